"""Communication is in flight while units compute, said by order and not by a clock.

The group notes what is sent and awaited (``benchmarks.schedule``); each unit notes when
it computes. ``on_streams`` goes the way of CUDA, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.link_group import link_world
from benchmarks.schedule import Schedule, Span, hidden, on_streams, seconds
from composable_fsdp import BackwardPrefetch
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.reference import PATHS, apply_units

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
        """Map ``(batch, WIDTH)`` to the same."""
        note(f"forward {name}", 1)
        ctx.save_for_backward(x, weight)
        ctx.note, ctx.name = note, name
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Twice the work of forward."""
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
        """Map ``(batch, WIDTH)`` to the same."""
        y: Tensor = Noted.apply(x, self.weight, self.note, self.name)  # type: ignore[no-untyped-call]  # torch
        return y


class Chain(nn.Module):
    """Units in a row, and work of no unit before each of them."""

    def __init__(self, units: int, note: Note) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(str(i), note) for i in range(units))
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
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
        "1": {"gather 0", "reduce 2"},
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
    """The reduction of the unit before is, but not without prefetch: the all-gather
    came after it. The next all-gather is with PRE during the whole unit, with POST only
    after it."""
    schedule = step_of(3, path=path, backward_prefetch=mode)

    assert flights(schedule, "backward") == IN_BACKWARD[mode]


@pytest.mark.req("S2-03")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ahead", [True, False])
def test_forward_computes_while_the_next_all_gather_is_in_flight(
    ahead: bool, path: str
) -> None:
    """With ``forward_prefetch`` the next unit's is, without it none."""
    schedule = step_of(3, path=path, forward_prefetch=ahead)

    found = flights(schedule, "forward")
    assert found.pop("before 0") == set()
    following = {"0": {"gather 1"}, "1": {"gather 2"}, "2": set()}
    during = {f"before {i + 1}": following[str(i)] for i in range(2)}
    expected = {**following, **during}
    assert found == (expected if ahead else {name: set() for name in expected})


def played(schedule: Schedule, slower: int = 1) -> list[Span]:
    """On a machine where a forward takes 1, and each unit's collective ``slower``."""
    return schedule.times(operations_per_second=1, bytes_per_second=GATHER / slower)


UNITS = 6
COMPUTED = 3 * UNITS
"""Forward is 1, backward is 2."""
EXPOSED = {PRE: 2, POST: 1 + UNITS, None: 2 * UNITS}
"""Collectives that backward waits for, of ``2 * UNITS``, if each is as long as a
forward: none but the first all-gather and the last reduction, the all-gathers, all."""


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
    spans = played(step_of(UNITS, cuda=cuda, between=0, **options))

    forward = 1 if ahead or cuda else UNITS
    assert seconds(spans) == COMPUTED + forward + EXPOSED[mode]


@pytest.mark.req("S2-03")
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_a_slow_link_is_never_idle(cuda: bool) -> None:
    """Where collectives take five times a forward, a step takes as long as they do, and
    the last unit's forward: what comes after it is gathered for nobody yet."""
    step = step_of(UNITS, cuda=cuda, between=0, forward_prefetch=True)
    spans = played(step, slower=5)

    sent = sum(span.end - span.begin for span in spans if span.kind == "send")
    assert sent == 3 * UNITS * 5
    assert seconds(spans) == sent + 1
    assert hidden(spans) == pytest.approx((COMPUTED - 1) / sent)
