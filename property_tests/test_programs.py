"""Whatever a program does, ours does what the plain model does, or refuses by name."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from property_tests.live import examples
from property_tests.program_examples import EVERY_DAY, EXAMPLES, ON_THREE
from property_tests.program_recipes import Program
from property_tests.program_strategies import programs
from property_tests.programs import run_programs
from tests.support.matrix import spread
from tests.support.sharded import RankCount
from tests.support.world import RankPool


def require_plain(pool: RankPool, found: list[Program]) -> list[str]:
    """Every program ends on every rank as the plain model's; returns last outcomes."""
    lasts = []
    with tempfile.TemporaryDirectory() as folder:
        verdicts = pool.run(run_programs, found, folder, timeout=60)
    for index, ends in enumerate(zip(*verdicts, strict=True)):
        failures = [f"rank {r}: {e.failure}" for r, e in enumerate(ends) if e.failure]
        assert not failures, "\n".join([f"{found[index]!r}", *failures])
        outcomes = [end.outcomes for end in ends]
        assert outcomes.count(outcomes[0]) == len(outcomes), (found[index], outcomes)
        # Whatever is done to parameters, also where a rank holds nothing of them.
        assert len({end.sent for end in ends}) == 1, (found[index], ends)
        lasts += outcomes[0][-1:]
    return lasts


@pytest.mark.req("P-01", "P-04", "P-05", "P-08", "P-10", "D-13", "S1-10", "S1-31")
@pytest.mark.req("D-08", "X-28", "B-11", "B-18", "D-11")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@examples(30)
@given(found=st.lists(programs(), min_size=1, max_size=4))
def test_programs_are_right_or_refused(
    ranks: RankCount, world_size: int, found: list[Program]
) -> None:
    """Losses, gradients, weights, buffers and states after every action."""
    for outcome in require_plain(ranks(world_size), found):
        event(outcome)


@pytest.mark.req("P-02", "P-03", "P-06", "P-07", "P-09", "P-11", "P-12", "P-14")
@pytest.mark.req("B-07", "R-02")
@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_that_were_wrong_once(
    ranks: RankCount, name: str, request: pytest.FixtureRequest
) -> None:
    """Each was silently wrong, crashed or hung, and stands here for an example.

    Every day the last variant of each runs, and all with ``--full-matrix``.
    """
    found = EXAMPLES[name]
    if not request.config.getoption("--full-matrix") and name not in EVERY_DAY:
        found = spread(found, 1)
    require_plain(ranks(3 if name in ON_THREE else 2), found)
