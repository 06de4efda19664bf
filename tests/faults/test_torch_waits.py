"""Ranks that wait in collectives of torch, or have ended, are told by name, and soon.

Torch itself waits until the time-out, 30 minutes by default, on both ranks.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from composable_fsdp import fully_shard
from composable_fsdp.comm import agreement, torch_waits, watch
from composable_fsdp.comm.hang_report import Position
from composable_fsdp.comm.in_vain import words_in_vain
from tests.faults.launch import Ended, launch
from tests.support.short_waits import shorten_waits
from tests.support.world import RankPool, World

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


@pytest.mark.few(1)
@pytest.mark.req("X-17")
@pytest.mark.parametrize("name", ["messages", "ahead"])
def test_a_rank_that_waits_in_another_group_is_not_accused(
    tmp_path: Path, name: str
) -> None:
    """Although it has issued more over a group of this rank, without waiting there."""
    assert [each.status for each in run(tmp_path, 3, name, "barrier")] == [0] * 3


@pytest.mark.few(1)
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


@pytest.mark.req("X-12", "X-17")
def test_a_verdict_of_a_destroyed_group_accuses_nobody(tmp_path: Path) -> None:
    """After another ``init_process_group`` with the store of torchrun."""
    found = run(tmp_path, 2, "again", "barrier")

    for each in found:
        assert "the first time: " in each.output
        assert each.status == 0, each.output


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
    # The group of the wait decides, once it is known.
    assert wait._replace(group="0@0").needs({"0@0": 2, "1@0": 8}) == "0@0"
    assert not wait._replace(group="0@0").needs({"0@0": 3, "1@0": 8})
    assert not wait._replace(group="7@0").needs({"0@0": 2, "1@0": 8})


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


def test_only_a_wait_of_some_seconds_counts() -> None:
    """A rank may be seen in a barrier that is about to end."""
    wait = torch_waits.TorchWait("barrier", 1.0, {"0@0": 3})
    at = Position(1, time.time(), "is at train.py:3", {}, wait)

    with mock.patch.object(torch_waits, "issued", return_value={"0@0": 2}):
        assert not words_in_vain([at], "0@0", {}, 2.0)
        at = at._replace(torch_wait=wait._replace(seconds=3.0))
        (text,) = words_in_vain([at], "0@0", {}, 2.0)

    assert "rank 1 waits 3 s in torch's barrier over process group '0'" in text


@pytest.mark.parametrize("async_op", [False, True])
def test_the_group_of_a_wait_is_told_and_no_issue_is_a_wait(*, async_op: bool) -> None:
    """The arguments of the function are read from the stack."""
    text = "def barrier(group, async_op):\n  reached.release(), lock.acquire()"
    reached, lock = threading.Semaphore(0), threading.Lock()
    space: dict[str, Any] = {"reached": reached, "lock": lock}
    # As if in the file of torch, whose function waits in C++.
    exec(compile(text, distributed_c10d.__file__, "exec"), space)
    lock.acquire()
    thread = threading.Thread(target=space["barrier"], args=("a group", async_op))
    with mock.patch.object(agreement, "name_in_store", "name of {}".format):
        thread.start()
        try:
            reached.acquire()
            time.sleep(0.1)
            found = torch_waits.WaitSeen().look(thread.ident)
        finally:
            lock.release()
            thread.join()

    told = None if found is None else (found.function, found.group)
    assert told == (None if async_op else ("barrier", "name of a group"))


def barrier_that_one_is_late_for(world: World) -> list[bool]:
    """Whether the position of rank 0 tells a barrier: while it waits, and after."""
    shorten_waits()
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    store, key = agreement.key_value_store(), f"{watch._WATCH.keys}/position/0"
    told = []
    if world.rank:
        time.sleep(2.5)
        told.append(Position(*json.loads(store.get(key))).torch_wait is not None)
    dist.barrier()
    # Longer than two looks, and no rank asks.
    time.sleep(1.0)
    if world.rank:
        told.append(Position(*json.loads(store.get(key))).torch_wait is not None)
    return told


@pytest.mark.req("X-17")
def test_a_rank_takes_back_that_it_waits(ranks: Callable[[int], RankPool]) -> None:
    """Else others would read for some seconds that it waits for them."""
    found = ranks(2).run(barrier_that_one_is_late_for, timeout=60, retire=True)

    assert found[1] == [True, False]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_wait_that_has_just_ended_is_not_in_vain(*, goes_on: bool) -> None:
    """A rank tells at its next look that a wait in torch is over."""
    wait = torch_waits.TorchWait("barrier", 5.0, {"0@0": 3}, "0@0")
    told = Position(1, time.time(), "is at train.py:3", {}, wait)
    later = told._replace(torch_wait=None) if goes_on else told
    group: Any = mock.Mock()
    group.left, group.name = False, "0@0"

    with (
        mock.patch.object(watch, "TICK", 0.01),
        mock.patch.object(watch, "_WATCH") as thread,
        mock.patch.object(torch_waits, "issued", return_value={"0@0": 2}),
    ):
        thread.group.return_value = group
        thread.positions.side_effect = [[told], [later]]
        words = watch.ranks_in_vain(group, [1])

    assert len(words) == (0 if goes_on else 1)


def test_an_ended_program_comes_no_more() -> None:
    """Whatever it was waiting for before."""
    ended = Position(1, 0.0, "has ended with ValueError: no", {})

    (text,) = words_in_vain([ended], "0@0", {}, 2.0)

    assert "rank 1 finished operation 0 and has ended with ValueError: no" in text
