"""Parts of a unit that are called apart from it are refused, alike on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    ShardingStrategy,
    register_forward_method,
    replicate,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import PhaseError
from composable_fsdp.phases import Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.parity import trains_as
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    gpt_input,
    gpt_units,
)
from tests.support.world import World


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Causal(nn.Module):
    """As models of Hugging Face: parts have getters, and methods call them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT()
        self.lm_head = nn.Linear(17, 17, bias=False)
        nn.init.normal_(self.lm_head.weight, generator=generator())

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def encode(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encode(tokens)


ROWS, GRADIENT = "this rank's rows", "this rank's alone"


def refused(
    world: World, act: Callable[[], object], *names: str, reason: str = ROWS
) -> None:
    """``act`` raises one text on all ranks, with ``names``, and sends nothing."""
    with record() as calls, pytest.raises(PhaseError) as caught:
        act()

    text = caught.value.args[0]
    assert world.all_equal(text)
    assert not calls
    for name in (*names, reason, "register_forward_method"):
        assert name in text, text


def plain_of(model: nn.Module) -> Causal:
    """A plain model with the values of ``model``. Collective: that of a state dict."""
    plain = Causal()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.req("P-12")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_parts_called_apart_are_refused_on_every_rank(world: World, path: str) -> None:
    """A head, an embedding, the model below the head, a method and a unit's layer."""
    tokens, hidden = gpt_input(0, world.rank), torch.randn(2, 5, 17)
    units = [f"model.{name}" for name in gpt_units(TinyGPT())]
    model = apply_units(Causal(), units, path=path)
    core: Any = getattr(model, "module", model)

    for _ in range(2):  # before a first forward, and after a step
        refused(world, lambda: core.lm_head(hidden), "Linear 'lm_head'", "'lm_head.w")
        refused(world, lambda: core.get_input_embeddings()(tokens), "'model.tokens'")
        refused(world, lambda: core.model(tokens), "Embedding 'model.tokens'")
        refused(world, lambda: core.encode(tokens), "module (Causal)")
        refused(world, lambda: core.model.blocks[1].up(hidden), "Linear", "up'")
        with torch.no_grad():
            refused(world, lambda: core.eval().lm_head(hidden), "'lm_head'")
        reference = copy.deepcopy(plain_of(model))
        trains_as(world, model, reference, gpt_input)


class Later(nn.Module):
    """A forward whose body runs after it has returned."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.compute(x, self.weight)


async def waits(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


async def streams(x: Tensor, weight: Tensor) -> Any:
    yield x @ weight


LATE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "generator": lambda x, weight: (each @ weight for each in [x]),
    "coroutine": waits,
    "async_generator": streams,
    "map": lambda x, weight: map(weight.matmul, [x]),
}


@pytest.mark.req("P-12")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_outputs_that_compute_later_are_refused(world: World, path: str) -> None:
    """Generators, coroutines and lazy maps; the unit is sharded and works after."""
    for kind, compute in LATE.items():
        model = apply_units(nn.Sequential(Later(compute)), ["0"], path=path)

        with pytest.raises(PhaseError, match=f"module '0' returned a {kind}, which"):
            model(torch.ones(4, 4))

        assert not any(
            handle.residency is not Residency.SHARDED
            for handle in _get_fsdp_handles(model)
        )
        late: Any = model.get_submodule("0")
        late = getattr(late, "module", late)
        late.compute = torch.matmul
        model(torch.ones(4, 4)).sum().backward()


def uncut(how: str) -> Any:
    """``Causal`` whose weights are whole on both ranks; blocks are units."""
    model, strategy = Causal(), ShardingStrategy.NO_SHARD
    units = [f"model.{name}" for name in gpt_units(model.model)]
    if how in PATHS:
        applied = apply_units(model, units, path=how, strategy=strategy)
        return getattr(applied, "module", applied)
    replicate(model)
    return model


@pytest.mark.req("P-12")
@pytest.mark.parametrize("how", [*PATHS, "replicate"])
@on_ranks(2)
def test_parts_of_units_that_are_not_cut_would_train_on_one_rank(
    world: World, how: str
) -> None:
    """Their weights are whole, but gradients would pass by the average over ranks."""
    tokens, hidden = gpt_input(0, world.rank), torch.randn(2, 5, 17)
    model = uncut(how)
    no = partial(refused, world, reason=GRADIENT)

    for _ in range(2):  # before a first forward, and after a step
        no(lambda: model.lm_head(hidden), "Linear 'lm_head'", "'lm_head.w", "2 ranks")
        no(lambda: model.encode(tokens), "'model.tokens'", "torch.no_grad()")
        no(lambda: model.model.blocks[1].up(hidden), "Linear", "up'", "up.weight'")
        reference = plain_of(model)
        with torch.no_grad():
            assert torch.equal(model.encode(tokens), reference.encode(tokens))
        trains_as(world, model, reference, gpt_input)
    model.lm_head.requires_grad_(False)
    model.lm_head(hidden)
    register_forward_method(model, "encode")
    assert torch.equal(model.encode(tokens), plain_of(model).encode(tokens))
