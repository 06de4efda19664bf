"""A short soak: the same steps three times over, with faults, leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composable_fsdp.comm.meeting import Call
from composable_fsdp.features.guard.meetings import history_of
from property_tests.soak import STEPS, Counts, Soak, action_of, counts, grown, soak
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
CYCLE = 40
SEED = 49


@pytest.mark.slow
@pytest.mark.req("X-06", "X-35")
def test_nothing_grows_over_steps_with_faults(ranks: RankCount, tmp_path: Path) -> None:
    """Memory, objects, keys of the store, threads and open files, on both paths."""
    assert {action_of(SEED, step) for step in range(CYCLE)} == set(STEPS)

    run = soak, SEED, 0, 3 * CYCLE, 10, str(tmp_path), CYCLE
    found = ranks(2).run(*run, timeout=100.0)

    for each in found:
        assert grown(each) == {}


def raise_often(world: World, folder: str, times: int) -> tuple[Counts, Counts]:
    """Raise in each forward, and never end one."""
    machine = Soak(world, SEED, folder)
    step = next(n for n in range(99) if action_of(SEED, n) == "raise_in_forward")
    machine.take(step)
    machine.take(step)
    before = counts(world)
    for _ in range(times):
        machine.take(step)
    return before, counts(world)


def test_forwards_that_all_raise_leave_no_key(ranks: RankCount, tmp_path: Path) -> None:
    """As of a script that leaves each forward at a layer by an exception."""
    for before, after in ranks(2).run(raise_often, str(tmp_path), 8):
        assert after["keys of the store"] == before["keys of the store"]


@pytest.mark.usefixtures("few_objects")
def test_what_fills_a_bounded_table_is_no_growth(one_rank: World) -> None:
    """A leak beside the table is."""
    calls = history_of(one_rank.group).order
    counts(one_rank)  # objects that other tests left may be freed by several passes
    before = counts(one_rank)
    for number in range(20):
        call = Call("save", f"model {number}", (number,))
        calls.following[call, 1, None] = call
    filled = counts(one_rank)
    leak = [[each] for each in range(10_000)]
    leaked = counts(one_rank)

    assert filled.get("objects of Call") == before.get("objects of Call")
    assert filled["objects"] - before["objects"] < 10
    assert leaked["objects"] - filled["objects"] >= 0.9 * len(leak)


def test_growth_is_seen_and_noise_is_not() -> None:
    """What filled a ring once, and what goes up and down, is no growth."""
    filled = [{"ring": min(10 * n, 50), "noise": n % 2, "leak": n} for n in range(30)]

    assert list(grown(filled)) == ["leak"]
