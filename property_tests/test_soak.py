"""A short soak: the same steps three times over, with faults, leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from property_tests.soak import STEPS, action_of, grown, soak
from tests.support.sharded import RankCount

CYCLE = 20
SEED = 3568
LONG = int(os.environ.get("COMPOSABLE_FSDP_SOAK", "0"))
"""Steps of the soak of ``make long``, all of them different."""


@pytest.mark.slow
@pytest.mark.req("X-06", "X-35")
@pytest.mark.parametrize("world_size", [2, 3] if LONG else [2])
def test_nothing_grows_over_steps_with_faults(
    ranks: RankCount, world_size: int, tmp_path: Path
) -> None:
    """Memory, objects, keys of the store, threads and open files, on both paths."""
    assert {action_of(SEED, step) for step in range(CYCLE)} == set(STEPS)
    # Fewer than 15 counts cannot tell growth from noise.
    every = max(1, min(50, LONG // 15)) if LONG else CYCLE
    steps, cycle = (LONG, LONG) if LONG else (3 * CYCLE, CYCLE)

    run = soak, SEED, steps, every, str(tmp_path), cycle
    found = ranks(world_size).run(*run, timeout=100.0 + LONG)

    for each in found:
        assert grown(each) == {}
