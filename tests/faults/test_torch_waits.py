"""Ranks that wait in collectives of torch, or have ended, are told by name, and soon.

Torch itself waits until the time-out, 30 minutes by default, on both ranks.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from composable_fsdp.comm import torch_waits
from composable_fsdp.comm.hang_report import Position
from composable_fsdp.comm.in_vain import words_in_vain
from tests.faults.launch import Ended, launch
from tests.support.short_waits import shorten_waits

PROGRAM = Path(__file__).with_name("leaving_calls_out.py")
SOON = 15.0
"""Seconds within which a rank has its error."""


def run(folder: Path, ranks: int, name: str, end: str = "nothing") -> list[Ended]:
    """Run a program of ``leaving_calls_out``; no rank may take long."""
    found = launch(
        name, end, ranks=ranks, folder=folder, program=PROGRAM, before=shorten_waits
    )
    for each in found:
        after = re.search(r"after (\d+\.\d) s", each.output)
        assert after, each.output
        assert float(after[1]) < SOON
    return found


@pytest.mark.few
@pytest.mark.req("X-12", "X-16", "X-17")
@pytest.mark.parametrize(
    ("name", "end", "told"),
    [
        # Two all-reduces would pair, which nobody can see.
        ("clip_alone", "barrier", "The all-reduce (clip_grad_norm_; operation"),
        ("one_more_batch", "barrier", "even_batches(loader, model) gives them the"),
        ("one_more_batch", "all_reduce", "even_batches(loader, model) gives them the"),
        ("state_alone", "barrier", "state_dict() of Sequential (root) was called on"),
        ("state_alone", "all_reduce", "state_dict() of Sequential (root) was called"),
    ],
)
def test_a_rank_that_waits_in_torch_is_named(
    tmp_path: Path, name: str, end: str, told: str
) -> None:
    """The rank that waits here raises; the other one has torch's error when it ends."""
    first, second = run(tmp_path, 2, name, end)

    assert (first.status, second.status) == (1, 1)
    assert told in first.output
    assert f"s in torch's {end} over process group '0'" in first.output
    assert "Connection closed by peer" in second.output


@pytest.mark.req("X-17")
def test_a_rank_that_is_late_for_torch_is_not_accused(tmp_path: Path) -> None:
    """Also if the other rank has sent its part before."""
    assert [each.status for each in run(tmp_path, 2, "late", "barrier")] == [0, 0]


@pytest.mark.req("X-12", "X-14")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tp_clip", "clip_grad_norm_(norm_type=2, torch.float32) of"),
        ("tp_forward", "state_dict() of Sequential (root) was called"),
    ],
)
def test_tensor_parallel_ranks_that_leave_a_call_out_are_named(
    tmp_path: Path, name: str, told: str
) -> None:
    """Those that wait for them inside of DTensor are named where the call was made."""
    found = run(tmp_path, 4, name)

    assert [each.status for each in found] == [1] * 4
    outputs = [each.output for each in found if "DesyncError" in each.output]
    assert any(told in text for text in outputs)
    assert any("in torch's wait_tensor" in text for text in outputs)


@pytest.mark.req("X-14")
def test_ranks_that_wait_for_each_other_in_two_groups_are_named(tmp_path: Path) -> None:
    """An expert without tokens: its group is another one than that of the model."""
    found = run(tmp_path, 4, "no_tokens")

    assert [each.status for each in found] == [1] * 4
    expert, root = found[1].output, found[3].output
    assert "DesyncError: The all-gather of 'experts.1' (forward; " in expert
    assert "rank 3 waits" in expert
    assert "reduce-scatter of (root) (backward; operation" in root
    for each in found:
        assert "waits in vain: rank" in each.output


@pytest.mark.req("X-12", "X-16")
def test_a_call_does_not_wait_for_a_program_that_has_ended(tmp_path: Path) -> None:
    """As ``if rank == 0: torch.save(model.state_dict())`` in the last line."""
    first, second = run(tmp_path, 2, "end_early")

    assert (first.status, second.status) == (1, 0)
    assert "state_dict() of Sequential (root) was called on this rank" in first.output
    assert re.search(r"rank 1 finished operation \d+ and has ended", first.output)


@pytest.mark.few(2)
@pytest.mark.req("X-12")
@pytest.mark.parametrize(
    ("name", "ranks", "told"),
    [
        ("copy", 2, "first_gather() of Sequential (root) was called on this rank"),
        ("copy_hybrid", 4, "first_gather() of Sequential (root) was called on this"),
        (
            "synced",
            2,
            "fully_shard(sync_module_states=True) of Linear was called on this",
        ),
    ],
)
def test_a_model_that_one_rank_uses_alone_sends_nothing(
    tmp_path: Path, name: str, ranks: int, told: str
) -> None:
    """What a new model sends would abort ranks that are in an all-gather."""
    found = run(tmp_path, ranks, name)

    assert [each.status for each in found] == [1] * ranks
    assert f"DesyncError: {told}" in found[1].output
    for each in found:
        assert told in each.output


def test_only_a_wait_that_needs_this_rank_is_in_vain() -> None:
    """A wait for all ranks of a group whose collective this rank has not issued."""
    wait = torch_waits.TorchWait("barrier", 5.0, {"0@0": 3, "1@0": 9})

    assert wait.needs({"0@0": 2, "1@0": 9}) == "0@0"
    assert wait.needs({"1@0": 8}) == "1@0"
    assert not wait.needs({"0@0": 3, "1@0": 10})
    assert not wait.needs({"2@1": 0})


def test_a_thread_that_waits_for_no_collective_is_in_none() -> None:
    """As a thread that sleeps or computes."""
    seen, done = torch_waits.WaitSeen(), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert seen.look(thread.ident) is None
    finally:
        done.set()
        thread.join()
    assert seen.look(None) is None


def test_an_ended_program_comes_no_more() -> None:
    """Whatever it was waiting for before."""
    ended = Position(1, 0.0, "has ended with ValueError: no", {})

    (text,) = words_in_vain([ended], "0@0", {}, 2.0)

    assert "rank 1 finished operation 0 and has ended with ValueError: no" in text
