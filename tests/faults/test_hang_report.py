"""A wait that takes long is explained: who waits where, and who is behind."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.errors import CollectiveError
from composable_fsdp.features.guard import hang_report, watch
from tests.support.sharded import RankCount
from tests.support.short_waits import shorten_waits
from tests.support.world import World


def steps(model: nn.Module, count: int) -> None:
    """Steps without an optimizer."""
    for _ in range(count):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()


class Lines(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        watch.LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def wait_for_a_sleeper(world: World, path: Path) -> list[str]:
    """The last rank sleeps in its program; what this rank logs meanwhile."""
    shorten_waits()
    os.environ[watch.HANG_VARIABLE] = "0.8"
    os.environ[hang_report.DIRECTORY_VARIABLE] = str(path)
    # A new group, because the watch of a group reads the variable once.
    group = dist.new_group(timeout=timedelta(seconds=40))
    inner = fully_shard(nn.Linear(8, 8), process_group=group)
    model = fully_shard(nn.Sequential(inner), process_group=group)
    steps(model, 3)
    log = Lines()
    if world.rank == world.world_size - 1:
        limit = time.monotonic() + 20
        while len(list(path.iterdir())) < 2 and time.monotonic() < limit:
            time.sleep(0.1)
    steps(model, 1)
    return log.lines


@pytest.mark.req("X-17", "U-10")
def test_a_long_wait_is_reported_by_name(ranks: RankCount, tmp_path: Path) -> None:
    """A line in the log of each rank that waits, and a file with its operations and
    stacks, which only the user can read. The program goes on."""
    logged = ranks(3).run(wait_for_a_sleeper, tmp_path, timeout=60, retire=True)

    assert logged[2] == []
    for rank, lines in enumerate(logged[:2]):
        (line,) = lines
        found = re.fullmatch(
            rf"rank {rank} has waited for \d+ s: it is in the all-gather of '0' "
            r"\(forward; operation \d+ of process group '\w+'\)\. .*Report: (.*)",
            line,
        )
        assert found is not None, line
        report = Path(found[1])
        assert report.parent == tmp_path
        assert stat.S_IMODE(report.stat().st_mode) == 0o600
        text = report.read_text()
        assert "all_gather '0' (forward" in text
        assert "in wait_for_a_sleeper" in text


def test_a_report_follows_no_link(
    one_rank: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever foresees the name cannot choose where the report goes; without a
    directory of the user, it goes to a new one that nobody else can enter."""
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    monkeypatch.setenv(hang_report.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "rank_0_7.txt").symlink_to(victim := tmp_path / "victim")

    assert hang_report.write("waits").startswith("not written (")
    assert not victim.exists()
    monkeypatch.delenv(hang_report.DIRECTORY_VARIABLE)
    written = Path(hang_report.write("waits"))
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    assert written.read_text().splitlines()[0].endswith(": waits")
    written.unlink()
    written.parent.rmdir()


def outlive(world: World) -> str:
    """Rank 1 leaves a step for longer than the group waits; the error of rank 0."""
    shorten_waits()
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = fully_shard(nn.Linear(8, 8), process_group=group)
    steps(model, 3)
    if world.rank:
        time.sleep(3)
        return ""
    with pytest.raises(CollectiveError) as caught:
        model(torch.ones(2, 8))
    return str(caught.value)


@pytest.mark.req("U-10")
def test_the_error_of_a_time_out_names_who_is_behind(ranks: RankCount) -> None:
    """By the last operation of each rank that has sent none for some time."""
    text, _ = ranks(2).run(outlive, timeout=60, retire=True)

    behind = r"Behind: rank 1 has finished the reduce-scatter of \(root\) \(backward; "
    assert "Behind" in text, text
    assert re.search(
        behind + r"operation \d+ of process group '\w+'\) \(\d s ago\)", text
    )
