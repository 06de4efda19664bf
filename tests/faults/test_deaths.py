"""A rank that dies, ends early, is stopped or gets a signal: what the others do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from composable_fsdp import save, verify
from composable_fsdp.comm import meshes
from composable_fsdp.storage import save as saving
from tests.faults.blocks import train_faulty
from tests.support import seam
from tests.support.scripts import launch
from tests.support.sharded import RankCount, gpt, message_of
from tests.support.short_waits import shorten_waits
from tests.support.world import World

SOON = 5.0
"""Seconds within which the ranks that live have ended after a death."""
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def losses_in(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


def raised(text: str) -> str:
    """The error of this package at the end of a traceback."""
    found = re.findall(r"^composable_fsdp\.errors\.(.*)$", text, re.MULTILINE)
    assert found, text
    return str(found[-1])


@pytest.mark.req("X-01", "X-02", "X-03")
@pytest.mark.parametrize(
    ("fault", "collective"),
    [
        ("kill-between-gathers", r"all-gather of 'blocks\.2' \(forward"),
        (
            "kill-in-backward",
            r"(reduce-scatter|all-gather) of 'blocks\.[012]' \(backward",
        ),
    ],
)
def test_ranks_that_outlive_a_kill_name_unit_and_operation(
    tmp_path: Path, fault: str, collective: str
) -> None:
    """They raise at once, not at the time-out, also out of gloo's reduce-scatter."""
    *living, dead = train_faulty(fault, ranks=3, folder=tmp_path)

    assert dead.status == -signal.SIGKILL
    for rank, ended in enumerate(living):
        assert ended.status == 1, ended
        assert ended.seconds < SOON
        text = raised(ended.output)
        # One of the ranks that live may raise first, and the other then loses that one.
        assert re.match(rf"CollectiveError: The ({collective}|\S+ of '\S+ \()", text)
        assert text.endswith(f"[rank {rank}]")
    texts = [raised(each.output) for each in living]
    assert any(re.search(collective, text) for text in texts), texts
    assert all(list(losses_in(each.output))[:2] == [1, 2] for each in living)


@pytest.mark.req("X-01", "X-02", "X-03", "U-07")
def test_training_that_is_killed_again_and_again_is_that_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    """Each restart goes on from the last save, over the store of the attempts before,
    as under torchrun."""
    faults = ["kill-in-backward", "kill-in-save"]
    steps = 4 * len(faults) + 4
    asked = ("--steps", str(steps))
    (whole := tmp_path / "whole").mkdir()
    expected = losses_in(train_faulty("none", *asked, ranks=2, folder=whole)[0].output)
    saves, store = tmp_path / "saves", seam.tcp_store()

    found: dict[int, float] = {}
    for number, fault in enumerate([*faults, "none"], start=1):
        at, folder = str(4 * number), str(saves)
        first, last = train_faulty(
            *(fault, *asked, "--at", at, "--folder", folder),
            ranks=2,
            folder=tmp_path,
            store=store,
        )
        # A rank that outlives a kill in the update ends in the save, which has no
        # partner, and has printed the loss of the step.
        found.update(losses_in(first.output))
        if fault != "none":
            assert (first.status, last.status) == (1, -signal.SIGKILL), first.output
            assert verify(saves).path == str(saves / f"step-{4 * number - 2}")

    assert list(expected) == list(range(1, steps + 1))
    assert found == expected


PROOF = (
    r"Rank 0 is in the all-gather of 'blocks\.1' \(forward; operation \d+ of "
    r"process group '\w+'\); rank 1 runs 'blocks\.2' of \d+ elements, where .* "
    r"They will never meet\."
)
DEPARTS = r"^DesyncError: In forward 3, at use 1, this rank runs 'blocks\.2'"
LEFT = "where the recorded order has: a backward of Blocks"
TOLD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fewer-batches": (
        (
            r"^CollectiveError: The all-gather of 'blocks\.0' \(forward",
            r"Behind: rank 1 has ended.*even_batches\(loader, model\) gives them",
        ),
        (),
    ),
    # The errors of the others quote an error that nobody caught.
    "raise-in-backward": (
        (
            r"'blocks\.1' \(backward; operation",
            "has ended with ValueError: a bad sample",
        ),
        (),
    ),
    # The sockets of the first to end close before the other has read why: it raises the
    # proof all the same, and not the error of the sockets.
    "swap": ((PROOF,), (DEPARTS, PROOF)),
    # As an expert without tokens.
    "skip-a-block": (
        (r"runs 'blocks\.2' of 144",),
        (
            r"^DesyncError: In forward 3, at use .*this rank runs 'blocks\.2' of 144",
            r"set_reduce_scatter_unused_params\(module, True\)",
        ),
    ),
    "no-backward": ((LEFT,), (LEFT,)),
}
"""Of each fault of rank 1, what the errors of both ranks say."""


@pytest.mark.req("X-06", "X-12", "X-14", "X-16")
@pytest.mark.parametrize("fault", TOLD)
def test_what_another_rank_did_is_named_at_once(tmp_path: Path, fault: str) -> None:
    """On both ranks, long before the time-out of the group."""
    asked = (fault, "--timeout", "40")
    first, last = train_faulty(*asked, ranks=2, folder=tmp_path, before=shorten_waits)

    assert (first.status, last.status) == (1, int(fault != "fewer-batches"))
    assert first.seconds < SOON
    for ended, words in zip((first, last), TOLD[fault], strict=True):
        for each in words:
            assert re.search(each, raised(ended.output)), ended.output


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

    vars(meshes)["_made"].clear()  # so that the group has the time-out of this test
    with (
        mock.patch.dict(os.environ, {meshes.CHECKPOINT_TIMEOUT: "1.2"}),
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
    assert re.search(r"DesyncError: This rank is in state_dict\(", first.output)
    assert "Rank 1 has ended with ValueError: a bad sample" in first.output


EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_resume.py"


def stopped_after(text: str) -> int:
    """The step that the example says it has stopped after."""
    found = re.search(r"^stopped after step (\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def require_saved(folder: Path, step: int) -> None:
    """The last checkpoint is whole and that of ``step``."""
    name = f"step-{step:06d}"
    found = verify(folder)
    assert found
    assert found.path == str(folder / name)


@pytest.mark.req("X-35")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The checkpoint is that of the step, and the exit status is 0."""

    def tell_last(processes: list[BaseProcess]) -> None:
        output, limit = tmp_path / "output_0", time.monotonic() + 20
        while time.monotonic() < limit:
            if output.exists() and "step 2 loss" in output.read_text():
                break
            time.sleep(0.02)
        pid = processes[-1].pid
        assert pid is not None
        os.kill(pid, number)

    folder = tmp_path / "saves"
    asked = ("--folder", str(folder), "--steps", "500", "--save-every", "500")

    first, last = launch(
        str(EXAMPLE), *asked, ranks=2, folder=tmp_path, meanwhile=tell_last
    )

    assert (first.status, last.status) == (0, 0), first.output + last.output
    step = stopped_after(first.output)
    assert 2 <= step < 500
    require_saved(folder, step)
