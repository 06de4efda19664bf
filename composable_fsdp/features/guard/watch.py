"""A thread that looks after long waits: proofs that ranks never meet, and reports.

Ranks send over a group in one order. So if two ranks are in unlike N-th operations, or
one waits in the store before its own N-th, they never meet, and both raise. All other
waits go on until the time-out. The thread visits the store only if its rank waits.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from composable_fsdp.comm import agreement
from composable_fsdp.comm.agreement import group_timeout, pauses
from composable_fsdp.comm.groups import GroupRef, Recorder, operation_log
from composable_fsdp.comm.operations import UNEVEN, Operation, OperationRecord
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard import hang_report
from composable_fsdp.features.guard.compare import SAME_CALLS, never_meet
from composable_fsdp.features.guard.progress import quiet_for, running_in
from composable_fsdp.naming import LISTED, listed, ranks_text

HANG_VARIABLE = "COMPOSABLE_FSDP_HANG_AFTER"
"""Seconds after which a wait is reported (0: never); else 60, or half the timeout."""

LOGGER = logging.getLogger("composable_fsdp.waits")
TICK = 1.0
"""Seconds between two looks of the thread, and two questions of a rank in the store."""
SLOW = 2.0
"""Seconds after which a wait is long."""
_QUIET = 30.0
"""Seconds without an operation after which a rank says what its last one was."""
_LEFT, _OWES, _WAITS = "left", "owes", "waits"
"""``_Note.does``: has raised and may go on; has raised for good; waits elsewhere."""


class _Note(NamedTuple):
    """What a rank does as its N-th operation over a group."""

    rank: int
    does: str | list[str | None]  # the operation and the unit
    predicate: str  # the same in words
    threads: list[str]  # of the program that use the group
    advice: str  # the way out


class GroupWatch(Recorder):
    """The watch over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.log = operation_log(group)
        self._name = agreement.agreed_name(group)
        self._ranks = dist.get_process_group_ranks(group)
        limit = group_timeout(group)
        self._report_after = min(float(os.environ.get(HANG_VARIABLE) or 60), limit / 2)
        self._quiet = min(_QUIET, limit / 4)
        self.broken = ""  # why no later collective over the group can pair
        self._away = ""  # the key by which this rank has told that it sends no more
        self.store_wait: StoreWait | None = None  # the wait of a thread in the store
        self._told: list[Any] = []  # what ``last/R`` says
        self._reported: object = None  # the wait that was reported last
        self._said = ""  # the key of the operation that this rank has told last
        self._proof = 0, ""  # the number of the operation that never ends, and why

    @property
    def keys(self) -> str:
        """The prefix of the keys in the store; empty before the ranks have a name."""
        return f"composable_fsdp/watch/{self._name.name}" if self._name.name else ""

    def threads(self) -> list[str]:
        """Return the names of the threads of the program that use the group."""
        used = [each for each in list(self.log.threads) if each.is_alive()]
        # Autograd's threads run while a thread of the program waits for them.
        return sorted(
            each.name for each in used if type(each) is not threading._DummyThread
        )

    def look(self, store: Any) -> None:
        """Look at the wait of this rank over the group, if it is long."""
        seconds, wait, told = self._wait()
        log = self.log
        if seconds < SLOW and (quiet_for(log) < self._quiet or self._told == told):
            return
        if not agreement.is_there(store):
            raise ConnectionError("the host of the store has ended")
        if self._told != told and self.keys:
            self._told = told
            value = json.dumps([*told, time.time()])
            store.set(f"{self.keys}/last/{dist.get_rank()}", value)
        # Where the device alone waits, this rank may still come to another place.
        if (host := waiting_in(log)) is not None:
            self._look_for_proof(store, host)
        if 0 < self._report_after < seconds and self._reported is not wait:
            self._reported = wait
            path = hang_report.write(f"rank {dist.get_rank()} {told[1]}")
            LOGGER.warning(
                "rank %d has waited for %.0f s: it %s. %sReport: %s",
                *(dist.get_rank(), seconds, told[1], self.last_words(), path),
            )

    def _wait(self) -> tuple[float, object, list[Any]]:
        """Return for how long this rank waits, in what, and what it does in words."""
        log, inside = self.log, self.store_wait
        # The operation in which the main thread waits, or the device is.
        waits = waiting_in(log) or running_in(log)
        if waits is not None:
            told = [waits.number, f"is in {OperationRecord.of(waits).title}"]
            # The host is behind the operation that the device is in.
            since = waits.waited or waits.issued
            seconds = quiet_for(log) if waits.done else (time.time_ns() - since) / 1e9
            return seconds, waits, told
        if inside is not None:
            return inside.waited, inside, [log.number, inside.predicate]
        text = "has sent no operation yet"
        if log.operations:
            text = f"has finished {OperationRecord.of(log.operations[-1]).title}"
        return 0.0, None, [log.number, text]

    def _look_for_proof(self, store: Any, waits: Operation) -> None:
        """Tell in which operation this rank waits; read what other ranks tell."""
        if not self.keys:
            return
        key, record = f"{self.keys}/op/{waits.number}", OperationRecord.of(waits)
        does = [waits.op, waits.unit]
        advice = UNEVEN if record.phase == "forward" else ""
        is_in = f"is in {record.title}"
        mine = self._note(does, is_in, advice)
        found = []
        if self._said != key:
            if self._said:
                store.delete_key(self._said)
            first = store.compare_set(key, "", mine)
            self._said = key if first.decode() == mine else ""
            found.append(first)
        # Also where a rank has left before it came to one that this rank has only sent.
        sent = [each for each in list(self.log.operations) if each.state == "issued"]
        for each in (*sent, waits):
            unlike = f"{self.keys}/op/{each.number}/unlike"
            if store.check([unlike]):
                found.append(store.get(unlike))
        for other in (_Note(*json.loads(text)) for text in found):
            # A rank that has left sends no more from any thread.
            proves = self._is_ordered(other) or other.does in (_LEFT, _OWES)
            if other.does != does and proves:
                store.compare_set(f"{key}/unlike", "", mine)
                both = {dist.get_rank(): is_in, other.rank: other.predicate}
                way_out = other.advice or advice or SAME_CALLS
                self._proof = waits.number, f"{never_meet(both)} {way_out}"

    def _note(self, does: str | list[str | None], *words: str) -> str:
        """Return what this rank does, for the store; ``words``: predicate, advice."""
        rank, (predicate, advice) = dist.get_rank(), words
        return json.dumps(_Note(rank, does, predicate, self.threads(), advice))

    def _is_ordered(self, other: _Note) -> bool:
        """Return whether one thread alone sends, here and on the other rank."""
        return other.threads == self.threads() and len(other.threads) < 2

    def awaited(self, operation: Operation) -> DesyncError | None:
        """Return the error that ends the wait for ``operation``, if it never ends."""
        number, text = self._proof
        if number != operation.number:
            return None
        self.broken, self.log.guarded = text, True
        # Ranks of the other groups of a hybrid model wait for this rank there.
        for other in _WATCH.like(self):
            other.raises(text, owes=False)
        return DesyncError(text)

    def leave(self, does: str, predicate: str, advice: str = "") -> None:
        """Tell ranks in the next operation that this rank does not send it."""
        mine = self._note(does, predicate, advice)
        if self.keys:
            key = f"{self.keys}/op/{self.log.number + 1}/unlike"
            first = agreement.key_value_store().compare_set(key, "", mine)
            self._away = key if first.decode() == mine else ""
        # Else this rank has issued nothing: if all ranks catch the error, they go on.
        if does != _LEFT:
            self.broken = f"Rank {dist.get_rank()} {predicate}."
        self.log.guarded = True

    def raises(self, text: str, *, owes: bool = False) -> None:
        """Tell that this rank raises ``text``; see ``Recorder.raises``."""
        with suppress(RuntimeError):
            if not self.broken:
                self.leave(_OWES if owes else _LEFT, f"raised: {text.rstrip('.')}")

    def elsewhere(self) -> _Note | None:
        """Return the note of a rank that waits in the next operation, or has left."""
        # This rank waits in the store before it could send that operation.
        store = agreement.key_value_store()
        key = f"{self.keys}/op/{self.log.number + 1}"
        if self.broken or not self.keys:
            return None
        if store.check([f"{key}/unlike"]):
            other = _Note(*json.loads(store.get(f"{key}/unlike")))
            if other.does == _LEFT and other.rank != dist.get_rank():
                return other
        if store.check([key]):
            other = _Note(*json.loads(store.get(key)))
            if self._is_ordered(other):
                return other
        return None

    def issued(self, operation: Operation) -> None:
        """Raise DesyncError before ``operation`` is sent, if the group is torn."""
        self.require_unbroken()
        # The program goes on after its error: what ``leave`` has told is over.
        with suppress(Exception):
            if self._away:
                agreement.key_value_store().delete_key(self._away)
        self._away, self.log.guarded = "", False

    def require_unbroken(self) -> None:
        """Raise DesyncError if a collective over the group was left."""
        if self.broken:
            raise DesyncError(
                f"Process group {self.log.name!r} was left in the middle of a "
                f"collective, and no later collective can pair: {self.broken} Save "
                "with composable_fsdp.save, which does not use this process group, and "
                "start the program again, or shard a model over a new process group."
            )

    def failed(self, operation: Operation) -> Exception | None:
        """Return the proof that a rank has left, if there is one."""
        # A rank that has raised may end before the thread here has read why, and its
        # sockets then close: the cause is worth more than the sockets.
        with suppress(Exception):
            self._look_for_proof(agreement.key_value_store(), operation)
            return self.awaited(operation)
        return None

    def last_words(self) -> str:
        """Return which ranks are behind, and in which operation, as the store knows."""
        behind: list[str] = []
        # The store may be gone together with the rank that hosts it, and the error of
        # the collective is worth more than another one.
        with suppress(Exception):
            store = agreement.key_value_store()
            for rank in self._ranks if self.keys else ():
                key = f"{self.keys}/last/{rank}"
                # A message lists a few ranks.
                if rank == dist.get_rank() or len(behind) == LISTED:
                    continue
                if how := self.ended(rank):
                    behind.append(f"rank {rank} {how}")
                elif store.check([key]):
                    its, told, at = json.loads(store.get(key))
                    if its < self.log.number or "operation" not in told:
                        ago = f"{max(0.0, time.time() - at):.0f} s ago"
                        behind.append(f"rank {rank} {told} ({ago})")
        return f"Behind: {listed(behind, '; ')}. " if behind else ""

    def ended(self, rank: int) -> str:
        """Return how the program of ``rank`` has ended; empty if it has not."""
        store, key = agreement.key_value_store(), f"{self.keys}/ended/{rank}"
        there = self.keys and store.check([key])
        return f"has ended{store.get(key).decode()}" if there else ""


class StoreWait:
    """The wait of this rank in the store for other ranks of ``group``; a context."""

    def __init__(
        self, group: dist.ProcessGroup, predicate: str, advice: str = ""
    ) -> None:
        self.predicate, self._advice = predicate, advice
        self._group, self._between = group, pauses(group.size())
        self._start = time.monotonic()
        self._limit = agreement.seconds_to_wait(group)
        self._question = min(SLOW, self._limit)
        self._watch = _WATCH.groups.get(group)

    def __enter__(self) -> StoreWait:
        if self._watch is not None:
            self._watch.store_wait = self
        return self

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.store_wait = None

    @property
    def waited(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._start

    def pause(self, absent: Callable[[], list[int]]) -> str:
        """Sleep, less than a second; return why the ranks ``absent`` do not come."""
        # Polling with growing pauses: a blocking wait would hold the connection to the
        # store, which other threads of this process share.
        time.sleep(next(self._between))
        waited = self.waited
        if waited < self._question:
            return ""
        # A question takes a round trip per missing rank.
        self._question = waited + max(TICK, self._group.size() / 256)
        missing, watch = absent(), self._watch
        if watch is not None:
            lost = {rank: how for rank in missing if (how := watch.ended(rank))}
            # A rank may have come and then ended.
            for rank in lost.keys() & (absent() if lost else []):
                return f"rank {rank} {lost[rank]}"
        # Before the proof: a call that has waited long enough leaves the group whole.
        if missing and waited > self._limit:
            words = "" if watch is None else watch.last_words()
            late = f"{ranks_text(missing)} did not come within {self._limit:g} s. "
            return f"{late}{words}".rstrip(" .")
        for other in [] if watch is None else _WATCH.like(watch):
            found = other.elsewhere()
            # If the other rank has passed this place, it has seen this rank come.
            if found is None or not (missing := absent()):
                continue
            # Over another group, only a rank that is awaited here proves anything.
            if other is watch or (found.rank in missing and found.does != _LEFT):
                other.leave(_WAITS, self.predicate, self._advice)
                both = {dist.get_rank(): self.predicate, found.rank: found.predicate}
                return never_meet(both)
        return ""


class _Watch:
    """The thread of this process, and the groups that it watches."""

    def __init__(self) -> None:
        self.groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupWatch] = (
            weakref.WeakKeyDictionary()
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        """The default group whose store the thread visits."""

    def add(self, group: dist.ProcessGroup) -> None:
        """Watch ``group``; start the thread at the first call for a default group."""
        if group in self.groups:
            return
        # The log decides about a wait, so the hot path reads a single attribute.
        operation_log(group).recorder = self.groups[group] = GroupWatch(group)
        world = dist.group.WORLD
        assert world is not None
        if self._world is None or self._world() is not world:
            self._world = weakref.ref(world)
            self._store = store = agreement.own_connection()
            # The thread of the default group before ends at its next look.
            self._thread = threading.Thread(
                target=self._run, args=(store,), name="composable_fsdp", daemon=True
            )
            self._thread.start()

    def like(self, watch: GroupWatch) -> list[GroupWatch]:
        """Return ``watch``, then those of groups that no other threads use."""
        others = [each for each in list(self.groups.values()) if each is not watch]
        same = watch.threads()
        return [watch, *(each for each in others if each.threads() in (same, []))]

    def stop(self) -> None:
        """End the thread, and say that the program ends; called at exit."""
        # A daemon thread that wants the interpreter's lock while the interpreter ends
        # aborts the process in C++ code of the store.
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join(5.0)
        store = self._store
        if store is None or not dist.is_initialized() or not agreement.is_there(store):
            return
        # The interpreter stores an exception that ends the program in ``last_value``.
        error = getattr(sys, "last_value", None)
        how = "" if error is None else f" with {type(error).__name__}: {error}"
        with suppress(Exception):
            for each in filter(lambda each: each.keys, list(self.groups.values())):
                store.set(f"{each.keys}/ended/{dist.get_rank()}", how)

    def _run(self, store: Any) -> None:
        """Look once a second until the process group or the program ends."""
        while not self._stop.wait(TICK):
            # Another thread looks into the store of a later default group.
            if self._store is not store or not dist.is_initialized():
                return
            # Whatever happens here, the program goes on.
            try:
                for each in list(self.groups.values()):
                    each.look(store)
            except Exception as error:
                LOGGER.debug("the watch over waits has ended: %r", error)
                return


_WATCH = _Watch()
atexit.register(_WATCH.stop)


def waiting_in(log: GroupRef) -> Operation | None:
    """Return the operation in which this rank waits; None if it waits in none."""
    # ``list`` of a deque is atomic: the main thread may append meanwhile.
    last = reversed(list(log.operations))
    return next((each for each in last if each.state == "running"), None)


def watch(groups: Iterable[dist.ProcessGroup], *, agree: bool = False) -> None:
    """Watch the collectives over ``groups`` that can compare."""
    # Before the ranks have a name in the store, no rank can be told what another waits
    # in.
    for group in groups:
        if not agreement.can_compare(group):
            continue
        _WATCH.add(group)
        if agree and (why := agree_on_name(group, "is in its first collective")):
            raise DesyncError(
                f"Rank {dist.get_rank()} uses process group {group.group_name!r} for "
                f"the first time, and {why.rstrip('.')}. {SAME_CALLS}"
            )


def agree_on_name(group: dist.ProcessGroup, predicate: str) -> str:
    """Wait until the ranks of ``group`` have a name in the store; return why not."""
    name = agreement.agreed_name(group)
    if not name.name:
        with StoreWait(group, predicate) as wait:
            while not name.step():
                if why := wait.pause(name.missing):
                    return why
    return ""


def leave_others(
    group: dist.ProcessGroup, known: Iterable[dist.ProcessGroup], text: str
) -> None:
    """Tell ranks of groups that are used like ``group`` that this one raises."""
    if group in _WATCH.groups:
        told = [_WATCH.groups.get(each) for each in known]
        for other in _WATCH.like(_WATCH.groups[group]):
            if other not in told:
                other.raises(text, owes=False)


def require_unbroken(group: dist.ProcessGroup) -> None:
    """Raise DesyncError if a collective over ``group`` was left."""
    if group in _WATCH.groups:
        _WATCH.groups[group].require_unbroken()
