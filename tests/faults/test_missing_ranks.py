"""A rank that is missing, stopped or dead in a call is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from composable_fsdp import save
from composable_fsdp.comm import nodes
from composable_fsdp.storage import save as saving
from tests.faults.blocks import train_faulty
from tests.support.sharded import RankCount, gpt, message_of
from tests.support.world import World


def stop_this_process(seconds: float) -> None:
    """SIGSTOP, and a SIGCONT from outside after ``seconds``."""
    wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wake]) as waker:
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()


def stopped_inside(world: World, folder: Path) -> str:
    model = gpt("composable")
    real: Any = vars(saving)["write_file"]

    def write_file(*args: Any, **options: Any) -> Any:
        if world.rank == 1:
            stop_this_process(2.5)
        return real(*args, **options)

    vars(nodes)["_made"].clear()  # so that the group has the time-out of this test
    with (
        mock.patch.dict(os.environ, {nodes.TIMEOUT_VARIABLE: "1.2"}),
        mock.patch.object(saving, "write_file", write_file),
        mock.patch.object(saving, "discard"),
    ):
        return message_of(lambda: save(folder / "x", model))


@pytest.mark.req("X-12")
def test_a_rank_that_is_stopped_inside_a_save_is_told(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The private group gives up after its own time-out, and nothing is committed."""
    text, _ = ranks(2).run(stopped_inside, tmp_path, retire=True)

    assert text.startswith("CheckpointError: Another rank was lost")
    assert not (tmp_path / "x" / "manifest.json").exists()


@pytest.mark.req("X-03")
def test_a_rank_that_ends_before_a_call_is_named_within_seconds(tmp_path: Path) -> None:
    """gloo knows that the connection is closed; nobody waits for the time-out."""
    first, _ = train_faulty(
        "raise-before-call", "--timeout", "60", ranks=2, folder=tmp_path
    )

    assert first.status == 1
    assert first.seconds < 8.0
    assert re.search(
        r"DesyncError: state_dict\(.*was called on this rank", first.output
    )
    assert "rank 1 has ended with ValueError: a bad sample" in first.output
