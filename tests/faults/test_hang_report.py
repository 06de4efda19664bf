"""A wait that takes long is explained: who waits where, and who is missing."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import CheckpointError, CollectiveError, fully_shard
from composable_fsdp.comm import hang_report, watch
from composable_fsdp.inspection.command_line import main
from composable_fsdp.inspection.hang_report import merge
from tests.support.short_waits import shorten_waits
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def steps(model: nn.Module, count: int) -> None:
    """Steps without an optimizer."""
    for _ in range(count):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()


def sleep_until_reported(path: Path, files: int) -> None:
    """Sleep until a report has ``files`` files, and the lines are printed, too."""
    limit = time.monotonic() + 20
    while len(list(path.glob("*/rank_*.json"))) < files and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(2)


def wait_for_a_sleeper(world: World, path: Path) -> str:
    """The last rank sleeps in its program; what this rank prints meanwhile."""
    shorten_waits()
    os.environ[watch.HANG_VARIABLE] = "0.8"
    os.environ[hang_report.DIRECTORY_VARIABLE] = str(path)
    # A new group, because the watch of a group reads the variable once.
    group = dist.new_group()
    inner = fully_shard(nn.Linear(8, 8), process_group=group)
    model = fully_shard(nn.Sequential(inner), process_group=group)
    steps(model, 3)
    printed, sys.stderr = sys.stderr, io.StringIO()
    try:
        if world.rank == world.world_size - 1:
            sleep_until_reported(path, world.world_size)
        steps(model, 1)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = printed


@pytest.mark.req("X-17", "U-10")
def test_a_long_wait_is_reported_by_name(
    ranks: RankCount, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on each rank that waits, a directory with a file of each rank, and a
    command that says at which rank to look. The program goes on."""
    printed = ranks(3).run(wait_for_a_sleeper, tmp_path, timeout=60, retire=True)

    for rank, text in enumerate(printed[:2]):
        line = (
            rf"composable_fsdp: rank {rank} waits \d+ s for the all-gather of '0' "
            r"\(forward; operation (\d+) of process group '\w+'\); "
        )
        found = re.search(line, text)
        assert found is not None, text
        assert f"rank {1 - rank} waits " in text
        done = int(found[1]) - 1
        asleep = rf"rank 2 finished operation {done} and is at test_hang_report.py:\d+ "
        assert re.search(rf"{asleep}\(sleep_until_reported\)", text), text
    assert printed[2] == ""

    (directory,) = tmp_path.iterdir()
    assert sorted(each.name for each in directory.iterdir()) == [
        f"rank_{rank}.json" for rank in range(3)
    ]
    report = json.loads((directory / "rank_0.json").read_text())
    assert ["Sequential", "'0'", "IDLE", "GATHERING"] in report["states"]
    assert any("wait_for_a_sleeper" in line for line in report["stacks"]["MainThread"])
    assert main(["hang-report", str(directory)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("look at rank 2 first: they have issued fewest collectives")
    assert "rank 2: waits in no collective; is at test_hang_report.py:" in told


def test_a_rank_without_a_file_is_the_first_to_look_at(tmp_path: Path) -> None:
    """A stopped or dead rank writes nothing; a damaged file is named."""
    numbers = {"0": [7, 6]}
    for rank in (0, 2):
        report = {
            "rank": rank,
            "world_size": 3,
            "numbers": numbers,
            "waits": "waits 70 s in The all-gather",
            "program": "is at train.py:3 (main)",
            "operations": {"0": ["7 all_gather"]},
        }
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(report))

    assert merge(tmp_path)["look_at"] == [1]
    assert merge(tmp_path)["missing"] == [1]
    (tmp_path / "rank_2.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"rank_2\.json is not a file of a hang"):
        merge(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no file rank_N\.json"):
        merge(tmp_path / "absent")


def outlive(world: World) -> str:
    """Rank 1 leaves a step for longer than the group waits; the error of rank 0."""
    shorten_waits()
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = fully_shard(nn.Linear(8, 8), process_group=group)
    steps(model, 3)
    if world.rank:
        time.sleep(3.5)
        return ""
    with pytest.raises(CollectiveError) as caught:
        model(torch.ones(2, 8))
    return str(caught.value)


@pytest.mark.req("U-10")
def test_a_failed_collective_says_where_the_others_were(ranks: RankCount) -> None:
    """Each rank tells its position when another waits."""
    text, _ = ranks(2).run(outlive, timeout=60, retire=True)

    here = (
        r"Last words: rank 1 finished operation \d+ and is at test_hang_report.py:\d+ "
    )
    assert re.search(rf"{here}\(outlive\)", text), text


def test_a_line_names_few_of_many_ranks(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks without an answer come first, then those that are behind."""
    heard = {
        rank: hang_report.Position(
            rank, 100.0, "is asleep", {"world": [rank, None, 0, "", 0.0]}
        )
        for rank in (1, 2, 4)
    }

    words = hang_report.tell(range(1, 50), heard, "world", 99.0)

    assert words[:2] == ["rank 3 does not answer", "rank 5 does not answer"]
    assert [text.split(" and ")[0] for text in words[29:32]] == [
        f"rank {rank} finished operation {rank}" for rank in (1, 2, 4)
    ]
    assert words[32:] == [f"rank {rank} was not asked" for rank in range(33, 50)]
