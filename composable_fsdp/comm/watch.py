"""A thread that tells other ranks where this rank is, and this rank who is missing.

The main thread of a rank that waits in a collective can answer nobody, so a daemon
thread with a connection of its own to the key-value store answers for it. The thread
looks once a second at the sequences of collectives (``comm.sequence``), and visits the
store only if this rank waits long, and every few seconds to read whether a rank asks::

    position   a rank that waits, or was asked: its last operation in each group, and
               the line of the program that it executes
    verdict    a rank that has left the order, and found another rank in a collective
               that it will never send: both raise DesyncError
    report     a rank has waited for a minute: a line that names the missing ranks, and
               a directory of files (``comm.hang_report``)

A rank that is only late has no position in a collective, so no verdict is possible,
however long the other ranks wait.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from composable_fsdp.comm import agreement, hang_report, torch_waits, verdicts
from composable_fsdp.comm.debug import is_debugging, require_same_operation
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.hang_report import (
    ENDED,
    MOST_RANKS,
    Position,
    lower,
    tell,
)
from composable_fsdp.comm.in_vain import cycle_text, left_text, words_in_vain
from composable_fsdp.comm.nodes import group_timeout
from composable_fsdp.comm.operations import (
    OperationRecord,
    Reporter,
    operation_log,
    waiting_in,
)
from composable_fsdp.comm.progress import running_in, waited_for
from composable_fsdp.comm.sequence import Operation
from composable_fsdp.comm.verdicts import ACTED, SAID, WITHDRAWN
from composable_fsdp.errors import DesyncError, FSDPError
from composable_fsdp.naming import listed

HANG_VARIABLE = "COMPOSABLE_FSDP_HANG_AFTER"
"""Environment variable: seconds after which a wait is reported; 0 for never.

Default: 60, and at most half the timeout of the process group."""

TICK = 1.0
"""Seconds between two looks of the thread."""
SLOW = 2.0
"""Seconds of a wait after which this rank tells its position."""
_ASK_EVERY = 4
"""Number of ticks between two reads of the key that asks all ranks."""
_MOST_FAILURES = 2
"""Number of looks in a row that fail before the watch ends."""
_KEYS = "composable_fsdp/watch"


class GroupWatch(Reporter):
    """The watch over a process group: positions of other ranks, and verdicts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = GroupRef(group)
        self.name = agreement.name_in_store(group)
        self.ranks = dist.get_process_group_ranks(group)
        limit = group_timeout(group) / 2
        self.report_after = min(float(os.environ.get(HANG_VARIABLE) or 60), limit)
        self.left = False
        """Whether this rank has left the order, or a collective before its end."""
        self.compares = is_debugging()
        """Whether every collective is compared before it is sent."""
        self.told: str | None = None
        """The verdict of another rank, once the thread has read the verdict."""
        self._vain: tuple[int, str] | None = None
        """Number of the operation that waits for a rank that waits elsewhere; why."""
        self.looked = 0.0
        """Seconds of a wait after which ``look_for_cycle`` has looked last."""
        self.asked = self.reported = 0
        """Number of the last operation about which other ranks were asked, and of the
        last that was reported."""

    def verdict(self) -> DesyncError | None:
        """Return the error that ends the wait of the main thread, if any."""
        if self.told is None:
            return self._verdict_of_cycle()
        if not self._move(SAID, ACTED):
            # The other rank sends again.
            self.told = None
            return None
        # Only now: the rank that said the verdict may have come back in time. The
        # collective in which this rank waited stays without its partners.
        self.leave()
        return DesyncError(self.told)

    def _verdict_of_cycle(self) -> DesyncError | None:
        """Return the error about a rank that waits for this rank elsewhere, if any."""
        waits, (number, text) = self.waiting(), self._vain or (0, "")
        if waits is None or waits.number != number:
            self._vain = None
            return None
        pronounce(self._group.get(), text, torn=True)
        pronounce_everywhere(text)
        return DesyncError(text)

    def look_for_cycle(self, waits: Operation) -> None:
        """Look whether a rank that is missing waits for this rank elsewhere."""
        # Twice as long each time, because a look reads positions of up to 32 ranks.
        seconds = waited_for(waits)
        if not seconds > 2 * SLOW or self.looked <= seconds < 2 * self.looked:
            return
        self.looked = seconds
        # A rank that has issued ``waits`` is not waited for.
        name, number = self.name, waits.number
        told = _WATCH.positions(self.ranks)
        behind = [each for each in told if each.groups.get(name, [0])[0] < number]
        words = words_in_vain(behind, name, _WATCH.numbers(), SLOW)
        if words:
            self._vain = number, cycle_text(OperationRecord.of(waits), words)

    def hear(self, store: Any, waits: Operation) -> None:
        """Read the verdict of another rank that concerns ``waits``, if there is one."""
        key = f"{_WATCH.keys}/verdict/{self.name}"
        if self.told is None and store.check([key]):
            state, after, rank, text, _ = json.loads(store.get(key))
            others = state != WITHDRAWN and rank != dist.get_rank()
            # The rank that left takes part in all operations that it has issued.
            if others and waits.number > after:
                self.told = left_text(OperationRecord.of(waits), rank, text)

    def failed(self, operation: Operation, error: RuntimeError) -> FSDPError:
        """Return the verdict of a rank that ended, or the error about ``error``."""
        # A rank that has pronounced a verdict may end before the thread here reads the
        # verdict, and its sockets then close: the cause is worth more than the sockets.
        with suppress(Exception):
            self.hear(agreement.key_value_store(), operation)
            if (found := self.verdict()) is not None:
                return found
        return super().failed(operation, error)

    def leave(self) -> None:
        """Note that this rank has left the order, or a collective before its end."""
        self.left = operation_log(self._group.get()).guarded = True

    def before(self, operation: Operation) -> None:
        """Check ``operation`` before this rank sends it.

        Collective: with ``COMPOSABLE_FSDP_DEBUG=1`` an all-gather of 8 bytes; if the
            ranks differ, an all-gather of objects.
        Raises: DesyncError, as ``back``; or if another rank is about to send another
            operation.
        """
        if self.left:
            self.back()
        # The comparison sends operations of its own.
        if self.compares and not is_capturing():
            self.compares = False
            try:
                require_same_operation(operation, self._group.get())
            finally:
                self.compares = True

    def back(self) -> None:
        """Note that this rank sends again after it had left.

        Raises: DesyncError, if another rank has abandoned a collective meanwhile, or if
            this rank has.
        """
        if self.told is None and self._move(SAID, WITHDRAWN):
            self.left = False
            operation_log(self._group.get()).guarded = self.compares
            return
        raise DesyncError(
            f"Process group {self.name!r} was left in the middle of a collective, and "
            f"no later collective can pair: {self.told or 'see the earlier error.'} "
            "Save with composable_fsdp.save, which does not use this process group, "
            "and start the program again, or shard a model over a new process group."
        )

    def _move(self, before: str, after: str) -> bool:
        """Move the verdict from ``before``; return whether ``after`` is reached."""
        key = f"{_WATCH.keys}/verdict/{self.name}"
        return verdicts.move_verdict(key, before, after)

    def last_words(self) -> str:
        """Return where the other ranks said they are, as far as the store knows."""
        # A rank that raises or ends tells its position first, so the words are those of
        # the rank that caused the failure. The store may be gone together with the rank
        # that hosts it, and the error of the collective is worth more than another one.
        with suppress(Exception):
            words = _WATCH.positions(self.ranks)
            told = listed([each.told(self.name) for each in words], "; ")
            return f"Last words: {told}. " if told else ""
        return ""

    def waiting(self) -> Operation | None:
        """Return the operation in which the main thread waits, or the device is."""
        log = operation_log(self._group.get())
        return waiting_in(log) or running_in(log)

    def position(self) -> list[Any]:
        """Return the entry of this group in a ``Position``."""
        waits = self.waiting()
        number = operation_log(self._group.get()).number
        if waits is None:
            return [number, None, 0, "", 0.0]
        title = OperationRecord.of(waits).title
        return [number, title, waits.number, waits.op, waited_for(waits)]


class _Watch:
    """The thread of this process, and the groups that it watches."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupWatch] = (
            weakref.WeakKeyDictionary()
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident
        self._store: Any = None
        """The connection of the thread; also read by the main thread for positions."""
        self.keys = _KEYS
        """The prefix of the keys in the store."""
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        """The default group whose store the thread visits."""
        self._answered = 0
        self._ending = ""
        self._seen = torch_waits.WaitSeen()
        self._torch_wait: torch_waits.TorchWait | None = None
        self._told_wait: torch_waits.TorchWait | None = None
        """The wait in torch that the last position of this rank tells."""

    def add(self, group: dist.ProcessGroup) -> None:
        """Watch ``group``; start the thread at the first call."""
        log = operation_log(group)
        if group in self._groups:
            return
        if self._world is None or self._world() is not dist.group.WORLD:
            self._begin()
        # The log and not this object decides about a wait, so the hot path reads a
        # single attribute.
        found = log.watcher = self._groups[group] = GroupWatch(group)
        log.guarded = found.compares
        if self._thread is None or not self._thread.is_alive():
            self._main = threading.get_ident()
            self._store = store = agreement.own_connection()
            name = "composable_fsdp watch"
            self._thread = threading.Thread(
                target=self._run, args=(store,), name=name, daemon=True
            )
            self._thread.start()

    def _begin(self) -> None:
        """Forget the default group that was before this one, if there was one."""
        assert dist.group.WORLD is not None
        self._world = weakref.ref(dist.group.WORLD)
        self.keys = verdicts.keys_of_this_time(_KEYS)
        self._answered, self._torch_wait, self._told_wait = 0, None, None
        self._groups.clear()
        # The thread of before ends at its next look.
        self._thread = None

    def stop(self) -> None:
        """Say that the program ends, and end the thread; called at exit."""
        # A daemon thread that wants the interpreter's lock while the interpreter ends
        # is ended inside C++ code of the store, which aborts the process. So the thread
        # is told to end, and waited for. ``atexit`` runs before the lock is taken away.
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        # The interpreter stores an exception that ends the program in ``last_value``.
        # So the others learn why this rank is missing, even after its sockets are gone.
        error = getattr(sys, "last_value", None)
        reason = "" if error is None else f" with {type(error).__name__}: {error}"
        self._ending = f"{ENDED}{reason}"
        self._stop.set()
        thread.join(5.0)

    def group(self, group: dist.ProcessGroup) -> GroupWatch | None:
        """Return the watch over ``group``, if there is one."""
        return self._groups.get(group)

    def positions(self, ranks: Iterable[int]) -> list[Position]:
        """Return what other ranks said last. One round trip per rank."""
        # Positions of a few ranks suffice: whoever waits, waits for the slowest, and a
        # report of 1,024 ranks in a line would not be read.
        own, store, found = dist.get_rank(), self._store, []
        # The watch has ended, with the store or before.
        if store is None:
            return []
        for rank in [each for each in ranks if each != own][:MOST_RANKS]:
            key = f"{self.keys}/position/{rank}"
            if store.check([key]):
                found.append(Position(*json.loads(store.get(key))))
        return found

    def numbers(self) -> dict[str, int]:
        """Return the number of operations issued, by name of the group."""
        groups = list(self._groups.items())
        return {watch.name: operation_log(group).number for group, watch in groups}

    def _run(self, store: Any) -> None:
        """Look once a second until the process group or the program ends."""
        ticks = failures = 0
        # A store that has failed twice is gone with the rank that hosts it. There is no
        # new connection: connecting to a dead host waits as long as the group's
        # timeout.
        while failures < _MOST_FAILURES:
            ended = self._stop.wait(TICK)
            # Another thread looks into the store of a later default group.
            if self._store is not store or not dist.is_initialized():
                break
            # Whatever happens here, the program goes on: a watch must not be the reason
            # why training ends.
            try:
                if ended:
                    self._publish(store)
                else:
                    self._look(store, ticks)
                failures = 0
            except Exception:
                failures += 1
            if ended:
                break
            ticks += 1
        if self._store is store:
            self._store = None

    def _look(self, store: Any, ticks: int) -> None:
        """Publish the position if this rank waits or was asked; read verdicts."""
        slow = [
            (watch, waits)
            for watch in list(self._groups.values())
            if (waits := watch.waiting()) is not None and waited_for(waits) > SLOW
        ]
        # A rank that is not slow reads one number every few seconds, and writes only if
        # another rank has asked. So 1,024 ranks make 256 requests per second.
        asked = self._answered
        for watch, waits in slow:
            if watch.asked < waits.number:
                # All ranks tell their positions, for the error of this operation.
                watch.asked = waits.number
                self._answered = int(store.add(f"{self.keys}/asked", 1))
        in_turn = ticks % _ASK_EVERY == 0
        if slow or in_turn:
            asked = int(store.add(f"{self.keys}/asked", 0))
        self._torch_wait = wait = self._seen.look(self._main)
        in_torch = in_turn and wait is not None and wait.seconds > SLOW
        # A position about a wait that has ended would accuse this rank.
        over = torch_waits.is_over(self._told_wait, wait)
        if slow or in_torch or over or asked > self._answered:
            self._publish(store)
        if asked > self._answered:
            self._answered = asked
            hang_report.answer(store, self._main)
        for watch, waits in slow:
            # Where the device waits, no wait of the host is there to be ended.
            if not waits.done:
                watch.hear(store, waits)
                watch.look_for_cycle(waits)
            late = watch.report_after and waited_for(waits) > watch.report_after
            if late and watch.reported < waits.number:
                watch.reported = waits.number
                self._report(store, watch, waits)

    def _publish(self, store: Any) -> None:
        """Write the position of this rank."""
        position = Position(
            dist.get_rank(),
            time.time(),
            self._ending or hang_report.program(self._main),
            {each.name: each.position() for each in list(self._groups.values())},
            self._torch_wait,
        )
        store.set(f"{self.keys}/position/{position.rank}", json.dumps(position))
        self._told_wait = position.torch_wait

    def _report(self, store: Any, watch: GroupWatch, waits: Operation) -> None:
        """Ask all ranks where they are, print a line, and write the report."""
        asked, record = time.time(), OperationRecord.of(waits)
        path = hang_report.begin(store, record.title)
        self._answered = int(store.add(f"{self.keys}/asked", 1))
        # Other threads look every few seconds, and write their own file of the report
        # when they answer. A rank whose process is stopped or dead does neither.
        said: dict[int, Position] = {}
        others = watch.ranks
        for _ in range(2 * _ASK_EVERY):
            self._stop.wait(TICK)
            # Other ranks may report at the same time, and wait for this rank's answer.
            self._publish(store)
            # A rank that has answered is not read again: all ranks of a large job may
            # report at the same time.
            said.update((each.rank, each) for each in self.positions(others))
            others = [r for r in watch.ranks if r not in said or said[r].at <= asked]
            if sum(each.at > asked for each in said.values()) >= len(watch.ranks) - 1:
                break
        own = dist.get_rank()
        others = [rank for rank in watch.ranks if rank != own]
        words = tell(others, said, watch.name, asked - 2 * _ASK_EVERY * TICK)
        written = hang_report.write(path, self._main, words)
        waited = f"{waited_for(waits):.0f} s for {lower(record.title)}"
        hang_report.print_line(f"rank {own} waits {waited}", words, written)


_WATCH = _Watch()
atexit.register(_WATCH.stop)


def watch(groups: Iterable[dist.ProcessGroup]) -> None:
    """Watch the collectives over ``groups`` that can compare. Collective: none."""
    for group in groups:
        if agreement.can_compare(group):
            _WATCH.add(group)


def ranks_in_vain(group: dist.ProcessGroup, absent: Iterable[int]) -> list[str]:
    """Return why this rank waits in vain for the ranks ``absent``; usually empty.

    Called by a rank that waits in the store. A rank that waits in an operation which
    this rank has not issued waits for this rank, so that neither can go on. A few round
    trips to the store.

    Collective: none.
    """
    found = _WATCH.group(group)
    if found is None:
        return []
    positions = _WATCH.positions(absent)
    # After a verdict, the ranks that wait for this rank are about to give up.
    if found.left:
        return [each.told(found.name) for each in positions if each.has_ended]
    # A rank that is late waits in no operation beyond the last of this rank, so only
    # ranks that wait for this rank are found, and that does not change by waiting.
    words = words_in_vain(positions, found.name, _WATCH.numbers(), SLOW)
    if words:
        # A wait in torch may have ended a moment ago; the rank says so at its next
        # look, before a late rank can have come here.
        time.sleep(2 * TICK)
        positions = _WATCH.positions(absent)
        words = words_in_vain(positions, found.name, _WATCH.numbers(), SLOW)
    return words


def pronounce_everywhere(text: str) -> None:
    """Pronounce ``text`` over all groups, for a call that may be waited for in any.

    Collective: none.
    """
    for group, found in list(_WATCH._groups.items()):
        if not found.left:
            pronounce(group, text)


def pronounce(group: dist.ProcessGroup, text: str, *, torn: bool = False) -> None:
    """Tell the ranks of ``group`` that this rank raises ``text`` and sends no more.

    Ranks that wait in an operation which this rank has not issued raise, too.

    Args:
        group: the process group.
        text: the error.
        torn: whether the group is of no use any more. Default: False.

    Collective: none.
    """
    found = _WATCH.group(group)
    if found is None:
        return
    # Before the error is raised here, because the program may end this rank at once.
    with suppress(RuntimeError):
        key, number = f"{_WATCH.keys}/verdict/{found.name}", operation_log(group).number
        verdicts.say_verdict(key, ACTED if torn else SAID, number, text)
        found.leave()


def return_to(group: dist.ProcessGroup) -> None:
    """Note that this rank uses ``group`` again, after it may have left the order.

    Collective: none.
    Raises: DesyncError, if a collective was left unfinished.
    """
    found = _WATCH.group(group)
    if found is not None and found.left:
        found.back()
