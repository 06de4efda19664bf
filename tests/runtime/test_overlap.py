"""Communication is in flight while units compute, said by order and not by a clock.

The group notes what is sent and awaited (``benchmarks.schedule``); each unit notes when
it computes. ``on_streams`` goes the way of CUDA, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
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
from tests.runtime.events import (
    Event,
    block,
    gpt_steps,
    most_live,
    units_of,
    unused,
)
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
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

BLOCKS = [f"blocks.{i}" for i in range(4)]
ORDER = ["", *BLOCKS]


def moment(events: list[Event], what: str, unit: str) -> int:
    """Where the event stands."""
    return events.index((what, unit))


@pytest.mark.req("S2-01", "S2-04", "S1-06", "S2-02", "S1-33")
@pytest.mark.parametrize(
    ("path", "mode", "ahead", "live"),
    [
        ("composable", PRE, False, (2, 3)),
        ("wrapper", POST, False, (2, 2)),
        ("composable", None, False, (2, 2)),
        ("wrapper", PRE, True, (3, 3)),
    ],
)
@on_ranks(2)
def test_units_are_gathered_when_the_modes_say(
    world: World,
    path: str,
    mode: BackwardPrefetch | None,
    ahead: bool,
    live: tuple[int, int],
) -> None:
    """In backward, PRE: before the unit after it is freed. POST: after that, and before
    it is asked for. None: when it is asked for. In forward one ahead, from the second
    step on, which has a record. Few units have memory at once."""
    steps = gpt_steps(world.rank, path, backward_prefetch=mode, forward_prefetch=ahead)
    for step, (forward, whole) in enumerate(steps):
        assert units_of(forward, "gather") == ORDER
        for this, after in pairwise(ORDER):
            early = moment(forward, "gather", after) < moment(forward, "use", this)
            assert early == (ahead and step > 0)
        assert units_of(whole, "gather") == BLOCKS[::-1]
        for this, later in pairwise(BLOCKS):
            gather = moment(whole, "gather", this)
            before_free = gather < moment(whole, "free", later)
            before_asked = gather < moment(whole, "grad", this)
            assert (before_free, before_asked) == (mode is PRE, mode is not None)
    # The root comes full out of forward.
    assert (most_live(forward), most_live([("gather", ""), *whole])) == live


def list_ahead(model: nn.Module) -> None:
    """Blocks 0 and 3 gather two blocks ahead each, forward and backward."""
    first, second, third, last = (block(model, i) for i in range(4))
    set_modules_to_forward_prefetch(first, [second, third])
    set_modules_to_backward_prefetch(last, [third, second])


def take_back(model: nn.Module) -> None:
    list_ahead(model)
    set_modules_to_forward_prefetch(block(model, 0), [])
    set_modules_to_backward_prefetch(block(model, 3), [])


@pytest.mark.req("B-15", "D-03")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_listed_units_are_gathered_at_once_nearest_first(
    world: World, path: str
) -> None:
    """All of the list, in its order, before the unit itself is used or freed; not so
    without the list, or with one that was taken back."""
    run = partial(gpt_steps, world.rank, path, backward_prefetch=None)
    steps, without = run(arrange=list_ahead), run()
    for forward, whole in steps:
        assert units_of(forward, "gather") == ORDER
        assert units_of(whole, "gather") == BLOCKS[::-1]
        assert unused(forward) == unused(whole) == []
        for ahead in BLOCKS[1:3]:
            assert moment(forward, "gather", ahead) < moment(forward, "use", BLOCKS[0])
            assert moment(whole, "gather", ahead) < moment(whole, "free", BLOCKS[3])
    assert run(arrange=take_back) == without != steps


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
