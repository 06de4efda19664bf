"""Units that some ranks do not run: training is that of the plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composable_fsdp import BackwardPrefetch, ShardingStrategy
from property_tests.live import batches, examples
from tests.features.where import Program, check_programs
from tests.support.reference import PATHS, STRATEGIES
from tests.support.world import RankPool

PROGRAMS = st.builds(
    Program,
    drops=st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple),
    order=st.lists(st.integers(0, 1), max_size=3).map(tuple),
    kept=st.sampled_from(["nothing", "block", "span", "tower", "call", "body"]),
    calls=st.integers(1, 2),
    inner=st.booleans(),
    joins=st.sampled_from(["add", "times"]),
    frozen=st.sampled_from(["nothing", "tower", "block"]),
    early=st.booleans(),
    micro=st.integers(1, 3),
    path=st.sampled_from(PATHS),
    strategy=st.sampled_from(STRATEGIES),
    prefetch=st.sampled_from([*BackwardPrefetch, None]),
    reshards=st.booleans(),
    zeros=st.booleans(),
)
# Found by 200 random programs: a checkpoint recomputes a call without a graph, and the
# units stay full for the next micro-batch.
KEPT_FULL = Program(
    drops=(3, 1, 1, 1, 0),
    kept="body",
    frozen="tower",
    micro=2,
    path="wrapper",
    strategy=ShardingStrategy.SHARD_GRAD_OP,
    prefetch=BackwardPrefetch.BACKWARD_POST,
)


FIXED = [
    KEPT_FULL,
    Program(),
    Program(kept="block", joins="times", calls=2),
    Program(kept="span", order=(1, 0, 1)),
    Program(kept="body", early=False, micro=2),
    Program(kept="call", path="wrapper"),
    Program(inner=True, kept="tower", order=(0, 0)),
    Program(frozen="tower", reshards=False),
    Program(order=(), zeros=True, micro=3),
    Program(strategy=ShardingStrategy.NO_SHARD, micro=2, calls=2),
]
"""Checkpoints of each kind, calls in calls, frozen and whole units."""


@pytest.mark.req("W-06")
@pytest.mark.parametrize("world_size", [2, 3])
@examples(8)
@given(programs=batches(PROGRAMS))
@example(programs=FIXED)
def test_ranks_that_drop_units_train_as_the_plain_model(
    ranks: Callable[[int], RankPool], world_size: int, programs: list[Program]
) -> None:
    """Whatever each rank drops, and whatever the units do: nested, used twice or not at
    all, frozen, recomputed, accumulated, kept full, on either path."""
    ranks(world_size).run(check_programs, programs)
