"""The driver of random programs prints every kind of failure once, made small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from property_tests import long_programs
from property_tests.long_programs import kind_of, main, run_one
from property_tests.program_recipes import Options, Part, Program
from tests.support.world import RankPool

RankCount = Callable[[int], RankPool]

FAILING = Program(
    Part(children=(Part(core="div", children=(Part(core="mul"),)), Part())),
    width=3,
    options=Options(offload=True, optimizer="adamw"),
    actions=(("train", 1, "keep"), ("save",), ("forward", 2)),
)


def fails_with_mul(program: Program, world_size: int) -> tuple[str, str]:
    """Stand in for ranks: a core and a forward fail together."""
    fails = {"core:mul", "action:forward"} <= program.words()
    return "equal", f"rank 0: forward of 'a.b': {world_size}.5 and not 7" * fails


def test_a_failing_program_is_printed_once_and_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind once, with what repeats it, and the exit code tells."""
    several = st.integers(0, 3).map(lambda number: replace(FAILING, seed=number))
    monkeypatch.setattr(long_programs, "run_one", fails_with_mul)
    monkeypatch.setattr(long_programs, "programs", lambda: several)

    code = main(["--programs", "3", "--seed", "5", "--worlds", "2"])

    shown = capsys.readouterr().out
    small = Program(root=Part(core="mul"), actions=(("forward", 0),))
    assert code == 1
    assert shown.count("FAILURE") == 1
    assert "FAILURE seed 5 index 0 world 2: forward of '_': #and not #\n" in shown
    assert f"  {small!r}\n" in shown
    assert "      3 failed\n" in shown


def test_a_program_that_ends_well_has_no_failure(ranks: RankCount) -> None:
    """On real ranks."""
    assert run_one(Program(), 1) == ("equal to the plain model", "")


def test_deaths_are_told_apart_by_where_they_happened() -> None:
    """A rank that died has no message but the stack."""
    stack = (
        "rank 1: died of SIGSEGV; Stack\n"
        '  File "/x/composable_fsdp/flat/a.py", line 7 in go'
    )

    assert kind_of(stack) == "died of SIGSEGV flat/a.py:go"
    assert kind_of("rank 0: step: 1.5 and 'b'") == kind_of("rank 1: step: 2 and 'c'")


def test_a_failed_rank_is_told_before_those_that_wait_for_it() -> None:
    """The kind is that of the failure, and not that of the wait."""
    wait = (
        'rank 0: no answer after 5 s\n  File "/x/composable_fsdp/b.py", line 3, in go'
    )

    assert kind_of(f"rank 1: step: 1.5 and 'b'\n{wait}") == "step: #and '_'"
    assert kind_of(wait) == "no answer after b.py:go"
