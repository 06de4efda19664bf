"""A rank that is missing, stopped or dead in a call is named."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from composable_fsdp import save
from composable_fsdp.comm import agreement, nodes, watch
from composable_fsdp.storage import save as saving
from tests.faults.launch import launch
from tests.support.sharded import RankCount, gpt, message_of
from tests.support.short_waits import shorten_waits
from tests.support.world import World


def stop_this_process(seconds: float) -> None:
    """SIGSTOP, and a SIGCONT from outside after ``seconds``."""
    wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wake]) as waker:
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()


class Lines(logging.Handler):
    """Keeps the lines of the log, and their levels."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []
        watch.LOGGER.addHandler(self)
        watch.LOGGER.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append((record.levelno, record.getMessage()))


def stopped_before(world: World, folder: Path) -> tuple[str, list[tuple[int, str]]]:
    shorten_waits()
    watch.NOTICE_AFTER = 0.1
    model, log, text = gpt("composable"), Lines(), ""
    with mock.patch.dict(os.environ, {agreement.TIMEOUT_VARIABLE: "0.8"}):
        if world.rank == 1:
            stop_this_process(1.5)
        else:
            text = message_of(lambda: save(folder / "alone", model))
    save(folder / "both", model)
    return text, log.lines


@pytest.mark.req("X-12")
def test_a_rank_that_is_stopped_before_a_save_is_named(
    ranks: RankCount, tmp_path: Path
) -> None:
    """First by a neutral line of the log, at the end by the error; afterwards both
    ranks save."""
    (text, told), _ = ranks(2).run(stopped_before, tmp_path, retire=True)

    assert text.startswith("DesyncError: save() was called on this rank, and rank 1 ")
    assert "did not come within 0.8 s" in text
    assert "Call save on every rank, outside of any 'if rank == 0'." in text
    waits = (logging.INFO, "still waiting for [1]: this rank is in save()")
    assert set(told) <= {waits}
    assert waits in told
    assert sorted(os.listdir(tmp_path)) == ["both"]


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
    first, _ = launch("raise-before-call", "--timeout", "60", ranks=2, folder=tmp_path)

    assert first.status == 1
    assert first.seconds < 8.0
    assert re.search(
        r"DesyncError: state_dict\(.*was called on this rank", first.output
    )
    assert "rank 1 has ended with ValueError: a bad sample" in first.output
