"""On CUDA a collective is issued long before its end: where the device is, is known.

Events are stand-ins. The runtime of CUDA is one, too, where a thread changes its mode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import ShardingStrategy, fully_shard
from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import (
    MOST_OPERATIONS,
    GroupRef,
    operation_log,
    operation_logs,
)
from composable_fsdp.features.guard import progress
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.streams import FakeEvent, stream_order
from tests.support.world import fake_world


class Event:
    """A CUDA event that the device has reached, or has not."""

    def __init__(self, *, reached: bool = False) -> None:
        self.reached, self.asked = reached, 0

    def query(self) -> bool:
        self.asked += 1
        return self.reached


def world() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupRef]:
    """Four collectives that the host has left behind, long ago."""
    monkeypatch.setattr(progress, "QUIET", 0.0)
    with fake_world(2):
        for _ in range(4):
            collectives.all_reduce(torch.ones(2), world())
        yield operation_log(world())


def mark(log: GroupRef, *events: Event) -> None:
    for operation, event in zip(log.operations, events, strict=True):
        log.marks[event] = operation.number


@pytest.mark.req("U-10")
def test_the_first_event_that_is_not_reached_is_the_running_collective(
    log: GroupRef,
) -> None:
    """A reached event answers for all earlier operations; then the device goes on."""
    events = [Event(reached=True), Event(), Event(), Event()]
    mark(log, *events)

    assert progress.running_in(log) is log.operations[1]
    events[3].reached = True
    assert progress.running_in(log) is None
    assert [event.asked for event in events] == [1, 1, 1, 2]


def test_no_event_is_asked_for_around_a_capture(log: GroupRef) -> None:
    """CUDA ends a capture in which an event is asked for that the capture records."""
    before, inside = Event(), Event()
    mark(log, before, before, before, before)
    progress.note_capture(capturing=True)
    try:
        log.marks[inside] = 4
        assert progress.running_in(log) is None
    finally:
        progress.note_capture(capturing=False)

    assert progress.running_in(log) is None
    assert before.asked == inside.asked == 0


def cuda_runtime(result: int, modes: list[int]) -> object:
    """A CUDA runtime that notes the mode of the thread, and gives the mode before."""

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = 0
        return result

    return SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)


@pytest.mark.parametrize("result", [0, 1], ids=["set", "refused"])
def test_a_question_leaves_captures_of_other_threads_alone(
    log: GroupRef, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    """The thread sets its mode, and sets the mode back; without, it does not ask."""
    modes: list[int] = []
    event = Event()
    mark(log, event, event, event, event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: cuda_runtime(result, modes))

    running = progress.running_in(log)

    assert (running is None, event.asked) == ((True, 0) if result else (False, 1))
    assert modes == ([1] if result else [1, 0])
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert progress.running_in(log) is None  # another runtime, as ROCm


def test_the_group_that_gathers_has_the_mark() -> None:
    """With HFSDP that of the pieces, and not that of the shards."""
    with fake_world(4), stream_order():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Linear(8, 8)
        fully_shard(model, strategy=ShardingStrategy.HFSDP, device_mesh=mesh)
        (handle,) = _get_fsdp_handles(model)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        event = handle.events.gather.event
        marked = [log for log in operation_logs() if event in log.marks]

        assert marked == [operation_log(mesh.get_group("shard"))]


def test_units_on_streams_mark_their_collectives_and_hold_no_work() -> None:
    """Each gather and each reduction has an event of its own for a step; a capture
    takes all events away."""
    with fake_world(4), stream_order() as order:
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Tanh()))
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        log = operation_log(world())
        sent = list(log.operations)
        held = dict(log.marks)
        order.captured = {order.current}
        model(torch.ones(2, 8)).sum().backward()
        order.captured = set()
        progress.note_capture(capturing=False)  # as the next forward does
        assert not log.marks
        for _ in range(MOST_OPERATIONS):
            collectives.all_reduce(torch.ones(2), world())
        log.marks.update(held)
        assert progress.running_in(log) is None
        assert not log.marks  # units of long ago

    gathered = [
        each.number for each in sent if each.op in ("all_gather", "reduce_scatter")
    ]
    assert sorted(held.values()) == gathered[-len(held) :]
    assert len(held) == 4  # a gather and a reduction, two steps of each
    assert all(isinstance(each, FakeEvent) for each in held)
    assert all(each.work is None for each in sent)
