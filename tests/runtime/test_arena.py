"""Claims on arenas: full parameters stay at their addresses, and numbers the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    Arena,
    BackwardPrefetch,
    CPUOffload,
    Float8Wire,
    MixedPrecision,
    ShardingStrategy,
    forecast,
    simulate,
)
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
)
from tests.support.tiny import TinyGPT
from tests.support.world import World

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "zero2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {"strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "ahead": {"forward_prefetch": True},
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "late": {"backward_prefetch": None},
    "wire": {"wire": Float8Wire()},
}
by_options = pytest.mark.parametrize("options", OPTIONS)
by_arena = pytest.mark.parametrize(
    "arena",
    [Arena(poison=True), Arena(poison=True, reduce=True), Arena(shared=False)],
    ids=["shared", "reduce", "own"],
)


def addresses(model: nn.Module) -> list[int]:
    """Where the full leaves of all units are, in or out of use."""
    return [
        leaf.data_ptr()
        for handle in _get_fsdp_handles(model)
        for leaf in handle.form.placed
        if handle.form.needs_gather
    ]


def reduce_addresses(model: nn.Module) -> list[int]:
    """Where the gradients of all units are before their reduction."""
    return [
        view.data_ptr()
        for handle in _get_fsdp_handles(model)
        for region in handle.layout.trainable
        for view in region.reduce.views
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


@pytest.mark.req("M-07")
@by_arena
@by_options
@pytest.mark.parametrize("path", PATHS)
@on_ranks(1, 2, 3)
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
        reduced = reduce_addresses(models[1]) if arena.reduce else []
        seen.append(addresses(models[1]) + reduced)

    assert seen.count(seen[0]) == 5
    assert 0 not in seen[0]
    for ours, others in zip(*(m.state_dict().items() for m in models), strict=True):
        assert torch.equal(ours[1], others[1]), ours[0]


@pytest.mark.few(8)
@pytest.mark.req("M-07", "U-03")
@by_arena
@pytest.mark.parametrize("order", ["cpu", "cuda"])
@pytest.mark.parametrize("options", ["full", "zero2", "bf16", "ahead", "late", "wire"])
@pytest.mark.parametrize("make", [equal, unequal, text, Nested])
def test_the_planned_peak_is_that_of_a_step(
    make: Any, options: str, order: str, arena: Arena
) -> None:
    """Slots included, which are there from the first step on."""
    found, measured = peak_of(make, 8, order, arena=arena, **OPTIONS[options])

    assert found == pytest.approx(measured, rel=0.01)


@pytest.mark.req("M-07", "U-03")
@by_arena
def test_the_simulator_and_the_forecast_count_the_slots(arena: Arena) -> None:
    """Its peak is the plan's within 1 %, and slots stay between steps."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    units: Any = list(model)

    found = simulate(
        model, batch=torch.zeros(2, 512), world_size=8, units=units, arena=arena
    )

    planned = forecast(found.plan, optimizer="adamw", device_type="cuda")
    step = found.plan.step_memory()
    slots = step.slots
    assert found.peak.memory.total == pytest.approx(planned.total, rel=0.01)
    kept = planned.moments[-1].memory
    assert (kept.full, kept.reduce) == step.kept
    assert kept.full == sum(slot.nbytes for slot in slots)
    assert kept.reduce == (max(s.nbytes for s in slots) if arena.reduce else 0)
    assert f"arena: {len(slots)} slots" in str(found.plan)
    assert len(slots) == (2 if arena.shared else 6)
