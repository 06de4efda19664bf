"""Real architectures train sharded as they do unsharded, however they are applied.

Two ranks have batches of their own. Sums of two are commutative, so equal means bit by
bit, but for the two models with an encoder and a decoder (see `TOLERANCE`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from composable_fsdp import (
    CustomPolicy,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    fully_shard,
    unshard_params,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.tree.traversal import walk_states
from tests.architectures.zoo import (
    ARCHITECTURES,
    Built,
    batch,
    build,
    needs_transformers,
    own_loss,
)
from tests.runtime.parity import trains_as
from tests.support.reference import (
    PATHS,
    adamw,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Change = Callable[[nn.Module], object]

pytestmark = needs_transformers

CASES = [
    pytest.param("gpt2", marks=pytest.mark.req("U-12")),
    pytest.param("llama", marks=pytest.mark.req("U-12")),
    "mixtral",
    pytest.param("t5", marks=pytest.mark.req("U-12")),
    pytest.param("bert", marks=pytest.mark.req("U-12")),
    "whisper",
    "mamba",
    pytest.param("clip", marks=pytest.mark.req("D-13")),
]
TOLERANCE = dict.fromkeys(ARCHITECTURES, 0.0) | {"t5": 1e-6, "whisper": 1e-6}
"""What the encoder puts out goes into every layer of the decoder. Its gradient is the
sum of what they all give; each unit adds up its own uses first, which rounds in another
order. With the alias of the inputs taken out, both are equal bit by bit, too."""


def nothing(model: nn.Module) -> None:
    """Leave the model as it is."""


def by_class(built: Built) -> Any:
    """A unit for every layer, by class."""
    return ModuleWrapPolicy(set(built.layers))


def by_own_names(built: Built) -> Any:
    """A unit for every module whose class the model itself says not to split."""
    names: Any = built.model._no_split_modules
    return CustomPolicy(lambda module: type(module).__name__ in names)


def shard(
    built: Built,
    path: str = "composable",
    choose: Callable[[Built], Any] = by_class,
    *,
    tied_params: Any = "promote",
) -> nn.Module:
    """Apply one of the two paths by policy."""
    policy = choose(built)
    if path == "composable":
        return fully_shard(built.model, policy=policy, tied_params=tied_params)
    return FullyShardedDataParallel(
        built.model, auto_wrap_policy=policy, tied_params=tied_params
    )


def train_architecture(
    world: World,
    name: str,
    path: str,
    choose: Callable[[Built], Any] = by_class,
    before: Change = nothing,
    after: Change = nothing,
) -> None:
    """Three steps of AdamW: losses, names and values are those of the plain model."""
    built = build(name)
    before(built.model)
    plain = copy.deepcopy(built.model)
    sharded = shard(built, path, choose)
    after(sharded)
    inputs = partial(batch, name)

    assert len(list(walk_states(sharded))) > 2
    trains_as(
        world,
        sharded,
        plain,
        inputs,
        adamw,
        tolerance=TOLERANCE[name],
        loss_of=own_loss,
    )


@pytest.mark.few(5)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choose", [by_class, by_own_names])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_plain_model(
    ranks: RankCount, name: str, choose: Callable[[Built], Any], path: str
) -> None:
    """Three steps of AdamW leave the same losses and the same state dict."""
    ranks(2).run(train_architecture, name, path, choose)


@pytest.mark.parametrize("path", PATHS)
def test_a_tie_that_the_models_own_names_tear_apart_is_told(
    one_rank: World, path: str
) -> None:
    """BERT wants its embeddings whole, whose weight is the head's: both are named."""
    built = build("bert")

    with pytest.raises(PlanError) as error:
        shard(built, path, by_own_names, tied_params="error")

    assert "'bert.embeddings.word_embeddings.weight'" in str(error.value)
    assert "'cls.predictions.decoder.weight'" in str(error.value)
    assert "tied_params='promote'" in str(error.value)


def checkpoint(model: nn.Module, *, use_reentrant: bool) -> None:
    """Have every layer compute its activations again in backward."""
    hf: Any = model
    # The second name is that of transformers before 5.21.
    enable = getattr(hf, "activation_checkpointing_enable", None)
    (enable or hf.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def tie_again(model: nn.Module) -> None:
    """What training frameworks do once more after they have prepared a model."""
    hf: Any = model
    hf.tie_weights()


def tie_again_unsharded(model: nn.Module) -> None:
    """The same where it resizes a bias to the weight's rows, and so must see all."""
    with unshard_params(model):
        tie_again(model)


RECOMPUTED = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)


@pytest.mark.req("U-12")
@pytest.mark.parametrize(
    ("name", "path", "before", "after"),
    [
        ("llama", "composable", RECOMPUTED, nothing),
        ("t5", "composable", REENTRANT, nothing),
        ("t5", "wrapper", nothing, tie_again),
        ("bert", "composable", nothing, tie_again_unsharded),
    ],
)
def test_recomputing_and_tying_again_change_nothing(
    ranks: RankCount, name: str, path: str, before: Change, after: Change
) -> None:
    """The model's own checkpointing, and ``tie_weights`` of a sharded model."""
    ranks(2).run(train_architecture, name, path, by_class, before, after)
