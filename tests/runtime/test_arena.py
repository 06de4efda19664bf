"""Claims on arenas: full parameters stay at their addresses, and numbers the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    Placement,
    ShardingStrategy,
    fully_shard,
)
from composable_fsdp.features import Arena, Float8Wire
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.planning.test_peak_memory import Nested, equal, peak_of, text, unequal
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.sharded import message_of
from tests.support.tiny import TinyGPT
from tests.support.world import World

SHARD = ("shard",)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "zero2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {"strategy": ShardingStrategy.NO_SHARD},
    "zero1": {"strategy": ShardingStrategy.ZERO1},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "ahead": {"forward_prefetch": True},
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "late": {"backward_prefetch": None},
    "wire": {"wire": Float8Wire()},
}
# On a grid of ranks: pieces of the full parameters stay beside the slots.
PIECES: dict[str, dict[str, Any]] = {
    "rest": {"strategy": ShardingStrategy.HFSDP, "shard_world_size": 4},
    "between": {"placement": Placement(SHARD, ("shard:4",), SHARD, SHARD)},
}
by_options = pytest.mark.parametrize("options", OPTIONS)
by_arena = pytest.mark.parametrize(
    "arena",
    [Arena(poison=True), Arena(shared=False)],
    ids=["shared", "own"],
)


def addresses(model: nn.Module) -> list[int]:
    """Where the full leaves of all units are, in or out of use."""
    return [
        leaf.data_ptr()
        for handle in _get_fsdp_handles(model)
        for leaf in handle.form.placed
        if handle.form.needs_fill
    ]


def both(path: str, arena: Arena, **options: Any) -> list[nn.Module]:
    """The same model without and with an arena."""
    plain = TinyGPT(layers=4)
    return [
        apply_units(
            copy.deepcopy(plain), gpt_units(plain), path=path, arena=each, **options
        )
        for each in (None, arena)
    ]


@pytest.mark.few(4)
@pytest.mark.req("M-07")
@by_arena
@by_options
@pytest.mark.parametrize("path", PATHS)
@on_ranks(1, 3)
def test_addresses_stay_and_numbers_are_those_without_an_arena(
    world: World, arena: Arena, options: str, path: str
) -> None:
    """Over five steps, bit by bit; also the parameters that the steps lead to."""
    models = both(path, arena, **OPTIONS[options])
    optimizers = [sgd(model.parameters()) for model in models]
    seen = []
    for step in range(5):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model, gpt_input(step, world.rank))
            backward(loss)
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
        seen.append(addresses(models[1]))

    assert seen.count(seen[0]) == 5
    assert 0 not in seen[0]
    for ours, others in zip(*(m.state_dict().items() for m in models), strict=True):
        assert torch.equal(ours[1], others[1]), ours[0]


@pytest.mark.few(2)
@pytest.mark.req("M-07", "U-03")
@by_arena
@pytest.mark.parametrize("order", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options", ["full", "zero1", "zero2", "bf16", "ahead", "late", "wire", *PIECES]
)
@pytest.mark.parametrize("make", [equal, unequal, text, Nested])
def test_the_planned_peak_is_that_of_a_step(
    make: Any, options: str, order: str, arena: Arena
) -> None:
    """Slots included, which are there from the first step on."""
    given = {**OPTIONS, **PIECES}[options]
    found, measured, _ = peak_of(make, 8, order, arena=arena, **given)

    assert found.total == pytest.approx(measured, rel=0.01)


SHARED = Arena(poison=True)


class Ordered(nn.Module):
    """Linear layers, run in an order that may change; then other uses of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.order = list(range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x).relu() + x
        return x


def pair_of(arena: Arena, **options: Any) -> list[Ordered]:
    """The same model without and with an arena; each layer is a unit."""
    made = []
    for each in (None, arena):
        model = Ordered()
        for layer in model.layers:
            fully_shard(layer, arena=each, **options)
        made.append(fully_shard(model, arena=each, **options))
    return made


@pytest.mark.req("M-07")
@by_arena
@pytest.mark.parametrize("mode", ["full", "zero2"])
@on_ranks(2)
def test_an_order_that_the_plan_does_not_know(
    world: World, arena: Arena, mode: str
) -> None:
    """The order changes from step to step, layers are left out, and run twice."""
    models = pair_of(arena, **OPTIONS[mode])
    orders = [
        [0, 1, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0],
        [0, 2, 4, 1, 3, 5],
        [1, 3, 5],
        [3, 3, 1, 3],
        [0, 1, 2, 3, 4, 5],
    ]

    seen = []
    for step, order in enumerate(orders):
        x = wide_input(8)(step, world.rank)
        grads = []
        for model in models:
            model.order = order
            backward(model(x).square().sum())
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        for ours, others in zip(*grads, strict=True):
            assert torch.equal(ours, others)
        seen.append(addresses(models[1]))
    assert seen.count(seen[0]) == len(seen)


@pytest.mark.req("M-07")
@pytest.mark.parametrize("poison", [False, True])
@on_ranks(2)
def test_a_stale_view_reads_nan_in_a_poisoned_slot(world: World, poison: bool) -> None:
    """A view that is kept past its unit's turn; integers get bits of ones."""
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model[2].codes = nn.Parameter(torch.arange(6), requires_grad=False)
    kept: list[Tensor] = []
    model[2].register_forward_hook(
        lambda layer, *_: kept.extend([layer.weight.data, layer.codes.data])
    )
    for unit in (*model, model):
        fully_shard(unit, arena=Arena(poison=poison))
    with torch.no_grad():
        model(torch.ones(1, 8))

    weight, codes = kept
    assert bool(weight.isnan().all()) == poison
    assert (codes.tolist() == [-1] * 6) == poison


class Calling(nn.Module):
    """A layer that calls another, which is not below it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.others[0](x @ self.weight) @ self.weight
        return out


def calling(arena: Arena | None) -> nn.Sequential:
    """Layers 0 to 3, of which 2 calls 0."""
    zero, one, three = (nn.Linear(8, 8, bias=False) for _ in range(3))
    for linear in (zero, one, three):
        nn.init.eye_(linear.weight)
    model = nn.Sequential(zero, one, Calling(zero), three)
    for layer in model:
        fully_shard(layer, arena=arena)
    return fully_shard(model, arena=arena)


@pytest.mark.req("M-07")
@on_ranks(2)
def test_units_of_one_slot_that_are_used_together(world: World) -> None:
    """Layer 2 calls layer 0 in its own forward: 0 moves out if it was not used before,
    and is refused by name if it had its turn, so that graphs may have saved views."""
    results = []
    for arena in (None, SHARED):
        model = calling(arena)
        for _ in range(3):
            backward(model[1:](torch.ones(2, 8) + world.rank).sum())
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *results))

    refused = message_of(lambda: calling(SHARED)(torch.ones(2, 8)))
    assert refused.startswith(
        "PhaseError: Fully sharded module '0' is needed while '2' is in use"
    )
    assert "arena=Arena(shared=False)" in refused
    backward(calling(Arena(shared=False))(torch.ones(2, 8)).sum())
