"""``copy.deepcopy`` of sharded models: a model of its own, or an error in a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composable_fsdp import ShardingStrategy, unshard_params
from composable_fsdp.errors import PhaseError
from tests.runtime.parity import trains_as
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    sgd,
    train,
    train_reference,
)
from tests.support.world import World


def sharded_gpt(
    path: str, strategy: ShardingStrategy = STRATEGIES[0], *, tied: bool = False
) -> tuple[nn.Module, nn.Module]:
    """A small GPT with a unit per block, and the same model unsharded."""
    model = TinyGPT(tied_head=tied)
    plain = copy.deepcopy(model)
    units = gpt_units(model)
    return apply_units(model, units, path=path, strategy=strategy), plain


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_a_copy_and_its_original_train_apart(
    world: World, path: str, strategy: ShardingStrategy, tied: bool
) -> None:
    """Copied after a step, both go on as copies of the plain model do, bit by bit."""
    model, plain = sharded_gpt(path, strategy, tied=tied)
    train(model, world.rank, gpt_input, sgd, steps=1)
    train_reference(plain, world.world_size, gpt_input, sgd, steps=1)
    made, plain_copy = copy.deepcopy(model), copy.deepcopy(plain)

    for ours, theirs, shift in ((made, plain_copy, 5), (model, plain, 9)):
        later = lambda step, rank, by=shift: gpt_input(step + by, rank)  # noqa: E731
        trains_as(world, ours, theirs, later)
    assert type(made) is type(model)
    assert list(made.state_dict()) == list(plain.state_dict())


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_copy_in_the_middle_of_a_step_is_refused(world: World, path: str) -> None:
    """Each moment is named; between forward and backward the shards can be copied."""
    model, _ = sharded_gpt(path)
    inner = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))

    def attempt(*_: object) -> None:
        with pytest.raises(PhaseError, match=r"copy\.deepcopy was called on") as error:
            copy.deepcopy(model)
        tried.append(str(error.value))

    tried: list[str] = []
    hook = inner.register_forward_hook(attempt)
    y = model(gpt_input(0, world.rank))
    hook.remove()
    between = copy.deepcopy(model)
    y.register_hook(attempt)
    backward(y.sum())
    with unshard_params(model):
        attempt()

    for text, where in zip(tried, ("forward", "backward", "unshard_par"), strict=True):
        assert f"inside {'the ' * (where == 'forward')}{where}" in text
    expected = model.state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in between.state_dict().items())
