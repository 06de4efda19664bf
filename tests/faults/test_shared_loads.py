"""A rank that is lost while replicas share the reads of a load ends it on all."""

from __future__ import annotations

import re
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.faults.shared_load import LIMIT
from tests.support.scripts import launch

PROGRAM = str(Path(__file__).with_name("shared_load.py"))


def end_stopped(processes: list[BaseProcess]) -> None:
    """Kill the last rank, which does not end of itself, once the others have ended."""
    *others, stopped = processes
    for process in others:
        process.join(25)
    stopped.kill()


@pytest.mark.req("K-05")
@pytest.mark.parametrize("how", ["killed before", "stopped"])
def test_no_rank_waits_for_a_part_longer_than_the_time_out(
    how: str, tmp_path: Path
) -> None:
    """Each rank that is left raises a CheckpointError; none hangs, and none goes on."""
    *others, lost = launch(
        PROGRAM,
        how,
        ranks=3,
        folder=tmp_path,
        meanwhile=end_stopped if how == "stopped" else None,
    )

    assert lost.status == -9
    for ended in others:
        assert ended.status == 0, ended.output
        assert "CheckpointError: " in ended.output
        if how != "killed before":
            assert "The model is of no use now" in ended.output
        seconds = re.search(r"after (\S+) s", ended.output)
        assert seconds is not None
        # The exchange, and the agreement after it.
        assert float(seconds[1]) < 2 * LIMIT + 3
