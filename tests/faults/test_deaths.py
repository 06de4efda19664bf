"""A rank that dies, ends early or is stopped: what the others say, and how soon."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from composable_fsdp import verify
from tests.faults.blocks import train_faulty
from tests.support import seam
from tests.support.short_waits import shorten_waits

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


@pytest.mark.req("X-16")
def test_a_rank_without_further_batches_is_named(tmp_path: Path) -> None:
    """The others raise when it ends, and say that it has ended."""
    first, last = train_faulty("fewer-batches", ranks=2, folder=tmp_path)

    assert last.status == 0
    assert first.status == 1
    assert first.seconds < SOON
    text = raised(first.output)
    assert re.match(r"CollectiveError: The all-gather of 'blocks\.0' \(forward", text)
    assert "Behind: rank 1 has ended" in text
    assert "even_batches(loader, model) gives them the same number of steps." in text


@pytest.mark.req("X-06")
def test_a_rank_that_raises_tells_the_others_why(tmp_path: Path) -> None:
    """The errors of the others quote its error, which nobody caught."""
    first, last = train_faulty("raise-in-backward", ranks=2, folder=tmp_path)

    assert (first.status, last.status) == (1, 1)
    assert last.output.rstrip().endswith("ValueError: a bad sample")
    assert first.seconds < SOON
    text = raised(first.output)
    assert "'blocks.1' (backward; operation" in text
    assert "has ended with ValueError: a bad sample" in text


@pytest.mark.req("X-12")
def test_ranks_that_never_meet_both_say_so(tmp_path: Path) -> None:
    """The sockets of the first to end close before the other has read why: it raises
    the proof all the same, and not the error of the sockets."""
    first, last = train_faulty("swap", ranks=2, folder=tmp_path, before=shorten_waits)

    departs = "DesyncError: In forward 3, at use 1, this rank runs 'blocks.2'"
    assert raised(last.output).startswith(departs)
    proof = (
        r"Rank 0 is in the all-gather of 'blocks\.1' \(forward; operation \d+ of "
        r"process group '\w+'\); rank 1 runs 'blocks\.2' of \d+ elements, where .* "
        r"They will never meet\."
    )
    for ended in (first, last):
        assert re.search(proof, raised(ended.output)), ended.output


@pytest.mark.req("X-14")
def test_a_block_that_one_rank_leaves_out_is_named(tmp_path: Path) -> None:
    """As an expert without tokens: the rank says what it runs instead, and of what."""
    asked, instead = ("skip-a-block", "--timeout", "40"), "runs 'blocks.2' of 144"
    first, last = train_faulty(*asked, ranks=2, folder=tmp_path, before=shorten_waits)

    assert (first.status, last.status) == (1, 1)
    text = raised(last.output)
    assert text.startswith("DesyncError: In forward 3, at use ")
    assert f"this rank {instead}" in text
    assert "set_reduce_scatter_unused_params(module, True)" in text
    assert instead in raised(first.output)
    assert first.seconds < SOON


@pytest.mark.req("X-12")
def test_a_backward_that_one_rank_leaves_out_is_named(tmp_path: Path) -> None:
    """The rank that goes on to its next forward is told who waits, and where."""
    asked = ("no-backward", "--timeout", "40")
    both = train_faulty(*asked, ranks=2, folder=tmp_path, before=shorten_waits)

    assert [each.status for each in both] == [1, 1]
    for each in both:
        text = raised(each.output)
        assert "where the order of earlier rounds has a backward of Blocks" in text
