"""A rank that is missing or stopped in a save is named, within the group's time."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from composable_fsdp import save
from composable_fsdp.comm import agreement, nodes
from composable_fsdp.comm.nodes import group_timeout, private_group
from composable_fsdp.storage import save as saving
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, gpt, message_of
from tests.support.world import World


def stop_this_process(seconds: float) -> None:
    """SIGSTOP, and a SIGCONT from outside after ``seconds``."""
    wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wake]) as waker:
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()


def stopped_before(world: World, folder: Path) -> tuple[str, list[str]]:
    model = gpt("composable")
    with (
        warnings.catch_warnings(record=True) as told,
        mock.patch.object(agreement, "NOTICE_AFTER", 0.2),
        mock.patch.dict(os.environ, {agreement.TIMEOUT_VARIABLE: "0.6"}),
    ):
        warnings.simplefilter("always")
        text = ""
        if world.rank == 1:
            stop_this_process(1.2)
        else:
            text = message_of(lambda: save(folder / "alone", model))
    save(folder / "both", model)
    return text, [str(each.message) for each in told]


@pytest.mark.req("X-12")
def test_a_rank_that_is_stopped_before_a_save_is_named(
    ranks: RankCount, tmp_path: Path
) -> None:
    """First by a warning, then by the error; afterwards both ranks save."""
    (text, told), _ = ranks(2).run(stopped_before, tmp_path)

    assert text.startswith("DesyncError: save() was called on this rank, and rank 1 ")
    assert "did not call it within 0.6 s" in text
    assert told == [
        "save() was called on this rank, which waits for rank 1. Call save on every "
        "rank, outside of any 'if rank == 0'."
    ]
    assert sorted(os.listdir(tmp_path)) == ["both"]


def stopped_inside(world: World, folder: Path) -> tuple[str, list[str]]:
    model = gpt("composable")
    real: Any = vars(saving)["write_file"]

    def write_file(*args: Any, **options: Any) -> Any:
        if world.rank == 1:
            stop_this_process(2.5)
        return real(*args, **options)

    vars(nodes)["_made"].clear()  # so that the group has the time-out of this test
    with (
        warnings.catch_warnings(record=True) as told,
        mock.patch.object(agreement, "NOTICE_AFTER", 0.2),
        mock.patch.dict(os.environ, {nodes.TIMEOUT_VARIABLE: "1.2"}),
        mock.patch.object(saving, "write_file", write_file),
        mock.patch.object(saving, "discard"),
    ):
        warnings.simplefilter("always")
        text = message_of(lambda: save(folder / "x", model))
    return text, [str(each.message) for each in told]


@pytest.mark.req("X-12")
def test_a_rank_that_is_stopped_inside_a_save_is_named(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The private group gives up after its own time-out, and nothing is committed."""
    (text, told), _ = ranks(2).run(stopped_inside, tmp_path, retire=True)

    assert text.startswith("CheckpointError: Another rank was lost")
    assert "this rank waited for rank 1" in text
    assert "A checkpoint waits for rank 1" in told
    assert not (tmp_path / "x" / "manifest.json").exists()


@on_ranks(2)
def test_private_groups_take_the_time_out_of_the_default_group(world: World) -> None:
    """Unless a function, or the environment, tells another."""
    groups = [private_group((0, 1), "a test"), private_group((0, 1), "another", 7.0)]
    with mock.patch.dict(os.environ, {nodes.TIMEOUT_VARIABLE: "9"}):
        groups.append(private_group((0, 1), "a third", 7.0))

    assert [group_timeout(each) for each in groups] == [
        group_timeout(world.group),
        7.0,
        9.0,
    ]
