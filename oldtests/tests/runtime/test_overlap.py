"""Communication is in flight while units compute, said by order and not by a clock.

The group notes what is sent and awaited (``benchmarks.schedule``); each unit notes when
it computes. ``on_streams`` goes the way of CUDA, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.link_group import link_world
from benchmarks.schedule import Schedule, on_streams, seconds
from composable_fsdp import BackwardPrefetch, fully_shard
from composable_fsdp.access import (
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import tiny_mlp
from tests.support.reference import (
    PATHS,
    apply_units,
)
from tests.support.world import World

PRE, POST = BackwardPrefetch
WIDTH = 8
WORLD = 4
GATHER = WIDTH * WIDTH * 4 * (WORLD - 1) // WORLD
"""Bytes that one unit's collective moves."""
Flight = dict[str, set[str]]
Note = Callable[[str, float], object]


class Noted(torch.autograd.Function):
    """A product with a weight that tells when it is computed, each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, note: Note, name: str) -> Tensor:
        note(f"forward {name}", 1)
        ctx.save_for_backward(x, weight)
        ctx.note, ctx.name = note, name
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note(f"backward {ctx.name}", 2)
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0], None, None


class Unit(nn.Module):
    """One weight."""

    def __init__(self, name: str, note: Note) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.name, self.note = name, note

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Noted.apply(x, self.weight, self.note, self.name)  # type: ignore[no-untyped-call]  # torch
        return y


class Chain(nn.Module):
    """Units in a row, and work of no unit before each of them."""

    def __init__(self, units: int, note: Note) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(str(i), note) for i in range(units))
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            between = torch.eye(WIDTH)
            x = Noted.apply(x, between, self.note, f"before {unit.name}")  # type: ignore[no-untyped-call]  # torch
            x = unit(x)
        return x


def step_of(
    units: int,
    *,
    path: str = "composable",
    cuda: bool = False,
    between: float = 1.0,
    arrange: Callable[[Any], None] = lambda units: None,
    **options: Any,
) -> Schedule:
    """What the second step of a chain did; work between units counts ``between``."""
    schedule = Schedule()

    def note(name: str, amount: float) -> None:
        scale = between if "before" in name else 1.0
        schedule.note("compute", name, amount * scale)

    with link_world(WORLD, schedule):
        model = apply_units(
            Chain(units, note),
            [f"units.{i}" for i in range(units)],
            path=path,
            **options,
        )
        arrange(model.get_submodule("units"))
        handles = _get_fsdp_handles(model)
        with on_streams(schedule, handles) if cuda else nullcontext():
            model(torch.ones(2, WIDTH)).sum().backward()
            schedule.name_buffers(handles)  # named from the root, by the first forward
            schedule.events.clear()
            model(torch.ones(2, WIDTH)).sum().backward()
    return schedule


def flights(schedule: Schedule, way: str) -> Flight:
    """In short, what was in flight while each part computed."""
    return {
        name.removeprefix(f"{way} "): {
            text.replace("all_gather units.", "gather ").replace(
                "reduce_scatter units.", "reduce "
            )
            for text in sent
        }
        for name, sent in schedule.in_flight()
        if name.startswith(f"{way} ")
    }


IN_BACKWARD: dict[BackwardPrefetch | None, Flight] = {
    PRE: {
        "2": {"gather 1"},
        "before 2": {"gather 1", "reduce 2"},
        "1": {"gather 0"},
        "before 1": {"gather 0", "reduce 1"},
        "0": {"reduce 1"},
    },
    POST: {
        "2": set(),
        "before 2": {"gather 1", "reduce 2"},
        "1": {"reduce 2"},
        "before 1": {"gather 0", "reduce 1"},
        "0": {"reduce 1"},
    },
    None: {
        "2": set(),
        "before 2": {"reduce 2"},
        "1": set(),
        "before 1": {"reduce 1"},
        "0": set(),
    },
}


@pytest.mark.req("S2-03")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [PRE, POST, None])
def test_backward_computes_while_its_collectives_are_in_flight(
    mode: BackwardPrefetch | None, path: str
) -> None:
    """On CPU an all-gather takes its memory after the reduction of the unit before:
    the next one is with PRE during the whole unit, with POST only after it, so that
    the reduction is during the unit."""
    schedule = step_of(3, path=path, backward_prefetch=mode)

    assert flights(schedule, "backward") == IN_BACKWARD[mode]


UNITS = 6
COMPUTED = 3 * UNITS
"""Forward is 1, backward is 2."""
EXPOSED = {PRE: 2, POST: 1 + UNITS, None: 2 * UNITS}
"""Collectives that backward waits for, of ``2 * UNITS``, if each is as long as a
forward: none but the first all-gather and the last reduction, the all-gathers, all.
On CPU with PRE the reductions, but for the last but one: no all-gather follows it."""


@pytest.mark.req("S2-03")
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", [PRE, POST, None])
def test_a_step_takes_as_long_as_what_nothing_hides(
    mode: BackwardPrefetch | None, ahead: bool, cuda: bool
) -> None:
    """Compute, and the collectives that nothing is computed in. On CUDA the host runs
    ahead, so forward needs no prefetch."""
    options: dict[str, Any] = {"backward_prefetch": mode, "forward_prefetch": ahead}
    schedule = step_of(UNITS, cuda=cuda, between=0, **options)
    # A forward takes 1, and so does each collective of a unit.
    spans = schedule.times(operations_per_second=1, bytes_per_second=GATHER)

    forward = 1 if ahead or cuda else UNITS
    exposed = UNITS if mode is PRE and not cuda else EXPOSED[mode]
    assert seconds(spans) == COMPUTED + forward + exposed


# ---- which units are gathered ahead of their use ----


@pytest.mark.req("S2-02", "S2-04", "S1-06", "S1-33")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_forward_gathers_one_unit_ahead_if_asked(path: str, ahead: bool) -> None:
    """While a unit computes, the next one of the record comes; each once."""
    schedule = step_of(3, path=path, forward_prefetch=ahead)

    found = flights(schedule, "forward")
    following = {"0": {"gather 1"}, "1": {"gather 2"}, "2": set()}
    assert {unit: found[unit] for unit in "012"} == (
        following if ahead else {unit: set() for unit in "012"}
    )
    sent = [each.name for each in schedule.events if each.kind == "send"]
    # Forward and backward, of which the last unit comes full out of forward or not.
    assert sum("all_gather" in name for name in sent) == 6


def list_ahead(units: nn.ModuleList) -> None:
    """The first and the last unit gather two units ahead each."""
    first, second, third, last = units
    set_modules_to_forward_prefetch(first, [second, third])
    set_modules_to_backward_prefetch(last, [third, second])


def take_back(units: nn.ModuleList) -> None:
    list_ahead(units)
    set_modules_to_forward_prefetch(units[0], [])
    set_modules_to_backward_prefetch(units[3], [])


@pytest.mark.req("B-15", "D-03", "S2-01")
@pytest.mark.parametrize("path", PATHS)
def test_listed_units_are_gathered_at_once_nearest_first(path: str) -> None:
    """All of the list, before the unit itself is used; not so with a list that was
    taken back, nor without one."""
    run = partial(step_of, 4, path=path, backward_prefetch=None)
    listed, without = run(arrange=list_ahead), run()

    assert flights(listed, "forward")["0"] == {"gather 1", "gather 2"}
    assert flights(listed, "backward")["3"] == {"gather 2", "gather 1"}
    order = [e.name for e in listed.events if e.kind == "send" and "gather" in e.name]
    assert order == [f"all_gather units.{i}" for i in (0, 1, 2, 3, 3, 2, 1, 0)]
    assert flights(run(arrange=take_back), "backward") == flights(without, "backward")


def test_lists_take_units_of_one_tree_only(one_rank: World) -> None:
    """Another module is refused at once, a unit of another tree by the forward."""
    model, other = fully_shard(tiny_mlp()), fully_shard(tiny_mlp())
    match = "called on a Linear that is no fully sharded"

    with pytest.raises(CompositionError, match=match):
        set_modules_to_forward_prefetch(model, [model[0]])
    with pytest.raises(CompositionError, match=match):
        set_modules_to_backward_prefetch(model[2], [model])
    set_modules_to_forward_prefetch(model, [other])
    with pytest.raises(CompositionError, match="List units of one tree"):
        model(torch.ones(2, 8))
