"""Right programs that wait for long, in unusual ways, end without error or warning.

Whatever the watch over waits does after seconds, it does here after a fraction of one,
and ranks are late by several times that.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import (
    async_save,
    fully_shard,
    load,
    no_sync,
    save,
    unshard_params,
)
from composable_fsdp.comm.groups import operation_logs
from composable_fsdp.features.guard import watch
from tests.faults.test_calls_meet import CALLS, Trained
from tests.faults.test_deaths import stop_this_process
from tests.support.sharded import RankCount
from tests.support.world import World

LATE = 0.2
"""Seconds by which a rank is late; a wait counts as long after a fifth of that."""


class Interrupted(Exception):
    """Raised by a signal handler."""


def layers(group: dist.ProcessGroup | None, **options: Any) -> nn.Module:
    """Two units below a root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for each in (model[0], model[2]):
        fully_shard(each, process_group=group, **options)
    return fully_shard(model, process_group=group, **options)


def train(model: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()


def late(rank: int, who: int = 1) -> None:
    if rank == who:
        time.sleep(LATE)


def beside(work: Callable[[], None], main: Callable[[], None]) -> None:
    """Run ``work`` in a thread and ``main`` in this one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="beside")
    thread.start()
    main()
    thread.join(30)
    assert not errors, errors


def two_threads(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Two models in two threads over two groups, each late on another rank."""

    def first() -> None:
        late(rank, 0)
        train(first_model)

    def second() -> None:
        late(rank, 1)
        train(second_model)

    first_model, second_model = layers(one), layers(two)
    beside(first, second)


def same_group_meets(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Over one group: a thread waits in the store while the main thread sends."""
    first, second = layers(one), layers(one)
    train(first)
    train(second)
    first.state_dict()
    gone, order = threading.Event(), threading.Event()

    def work() -> None:
        # On rank 1, the state dict comes long after the forward of the main thread.
        if rank == 1:
            gone.wait(10)
            time.sleep(LATE)
        else:
            order.set()
        first.state_dict()

    def main() -> None:
        if rank == 0:
            order.wait(10)
            time.sleep(LATE)
        with torch.no_grad():
            next(second.parameters()).mul_(1)
        dist.barrier(two)
        gone.set()

    beside(work, main)


def asynchronous(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Rank 0 has sent an all-reduce that rank 1 sends at its end."""
    model, work = layers(one), None
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=two, async_op=True)
    train(model)
    late(rank)
    if work is None:
        dist.all_reduce(torch.ones(3), group=two)
    else:
        work.wait()


def stalls(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Each rank in turn is late in forward, backward and between steps."""
    model, turns = layers(one), list[int]()

    def forward(*_: object) -> None:
        late(rank, len(turns) % 2)

    def backward(*_: object) -> None:
        late(rank, 1 - len(turns) % 2)

    model.get_submodule("2").register_forward_pre_hook(forward)
    model.get_submodule("2").register_full_backward_hook(backward)
    for turn in range(3):
        train(model, 1)
        turns.append(turn)


def signals(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """A handler runs while this rank waits in a collective, and in the store."""
    model, seen = layers(one), []
    old = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    for call in (lambda: train(model, 1), model.state_dict):
        train(model)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, LATE / 2)
        late(rank)
        call()
    time.sleep(LATE)
    signal.signal(signal.SIGALRM, old)
    assert len(seen) == 2 * (rank == 0)


def interrupted(
    call: Callable[[nn.Module], Any], kind: type[BaseException] = Interrupted
) -> Callable[..., None]:
    """Rank 0 leaves a wait in the store by an exception; later both ranks call."""

    def program(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
        def leave(*_: object) -> None:
            raise kind

        model = layers(one)
        train(model)
        old = signal.signal(signal.SIGALRM, leave)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, LATE / 2)
            with pytest.raises(kind):
                call(model)
        signal.signal(signal.SIGALRM, old)
        dist.barrier(two)
        for _ in range(2):
            call(model)
            train(model, 1)

    return program


def stopped(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """SIGSTOP and SIGCONT of a rank that others wait for."""
    model = layers(one)
    train(model)
    if rank == 1:
        stop_this_process(2 * LATE)
    train(model)
    if rank == 0:
        stop_this_process(2 * LATE)
    model.state_dict()


def made_again(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Groups are destroyed and made again, and models with them."""
    for _ in range(3):
        group = dist.new_group([0, 1])
        model = layers(group)
        late(rank)
        train(model)
        model.state_dict()
        del model
        dist.destroy_process_group(group)


def caught(where: str) -> Callable[..., None]:
    """Every rank catches an exception at the same place, and all go on."""

    def program(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
        def refuse(*_: object) -> None:
            raise Interrupted

        model = layers(one)
        train(model)
        part = model.get_submodule("0")
        with suppress(Interrupted):
            if where == "forward":
                hook = part.register_forward_pre_hook(refuse, prepend=True)
                model(torch.ones(2, 8))
            elif where == "backward":
                hook = part.register_full_backward_pre_hook(refuse)
                model(torch.ones(2, 8)).sum().backward()
            else:
                hook = part.register_forward_hook(lambda *_: None)
                with unshard_params(model):
                    refuse()
        hook.remove()
        late(rank)
        train(model)

    return program


def other_order(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """All ranks change what they do, and one is late each time."""
    model, other = layers(one), layers(one)
    train(model, 5)
    late(rank)
    with no_sync(model):
        train(model)
    late(rank, 0)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 8))
    late(rank)
    train(other)
    late(rank, 0)
    train(model.train())
    late(rank)
    average = deepcopy(model)
    with torch.no_grad():
        average(torch.ones(2, 8))
    late(rank, 0)
    train(model)


def torch_between(rank: int, one: dist.ProcessGroup, two: dist.ProcessGroup) -> None:
    """Collectives of torch over the group of the model, and a rank late in each."""
    model, x = layers(one), torch.ones(2)
    train(model)
    objects: list[Any] = [None, None]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_reduce(x, group=one),
        lambda: dist.broadcast(x, 0, group=one),
        lambda: dist.all_gather_object(objects, rank, group=one),
        lambda: dist.barrier(one),
    )
    for call in calls:
        late(rank)
        call()
        train(model, 1)


PROGRAMS: dict[str, Callable[..., None]] = {
    **{
        each.__name__: each
        for each in (
            *(two_threads, same_group_meets, asynchronous, stalls, signals),
            *(stopped, made_again, other_order, torch_between),
        )
    },
    **{f"caught_in_{w}": caught(w) for w in ("forward", "backward", "unshard_params")},
    "interrupted_state_dict": interrupted(lambda m: m.state_dict()),
    "interrupted_by_ctrl_c": interrupted(lambda m: m.state_dict(), KeyboardInterrupt),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Short waits; warnings and lines of the log of this package are errors."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logs = Lines(logging.WARNING), operation_logs()
    logger, soon = logging.getLogger("composable_fsdp"), timedelta(seconds=LATE / 5)
    logger.addHandler(handler)
    kept = [log.patience for log in logs]
    for log in logs:
        log.patience = soon
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(watch, "TICK", LATE / 10),
            mock.patch.object(watch, "SLOW", LATE / 5),
            mock.patch("composable_fsdp.comm.groups.PATIENCE", soon),
        ):
            warnings.simplefilter("error")
            yield
    finally:
        logger.removeHandler(handler)
        for log, patience in zip(logs, kept, strict=True):
            log.patience = patience
    assert not lines, lines


def run_program(world: World, name: str) -> float:
    """Run a program over groups of its own; its seconds."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    began = time.monotonic()
    with quiet():
        PROGRAMS[name](world.rank, *groups)
    return time.monotonic() - began


@pytest.mark.req("X-12", "X-17", "R-12")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_ends_quietly(ranks: RankCount, name: str) -> None:
    """On both ranks."""
    ranks(2).run(run_program, name)


def late_in_calls(world: World, folder: Path) -> dict[str, float]:
    trained, took = Trained(world, folder), {}
    with quiet():
        for who, (name, call) in enumerate(CALLS.items()):
            dist.barrier()
            began = time.monotonic()
            late(world.rank, who % 2)
            call(trained)
            took[name] = time.monotonic() - began
        late(world.rank)
        handle = async_save(folder / "later", trained.model)
        late(world.rank, 0)
        handle.result()
        save(folder / "again", trained.model)
        late(world.rank)
        load(folder / "again", trained.model)
    return took


@pytest.mark.req("X-12", "R-12")
def test_a_rank_that_is_late_in_a_call_is_waited_for(
    ranks: RankCount, tmp_path: Path
) -> None:
    """In each of twenty calls, and no second longer than it is late; by turns."""
    for took in ranks(2).run(late_in_calls, tmp_path):
        assert len(took) == len(CALLS)
        assert max(took.values()) < 20 * LATE, took
