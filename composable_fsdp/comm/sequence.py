"""The sequence of collectives over a process group on this rank.

Every collective of this package is an ``Operation`` in the ``OperationLog`` of its
process group, whichever tree, direction or call sends the collective. The ranks of a
group issue their collectives in the same order, so the n-th operation of a rank pairs
with the n-th operation of every other rank::

    number  op              unit       phase or call     issued   waited   done
    410     all_gather      blocks.1   forward           .        .        .
    411     reduce_scatter  blocks.2   backward          .        .        .
    412     all_reduce                 clip_grad_norm_   .        .

An ``OrderLog`` expects the order in which a tree uses its units in a direction. A
*round* is a forward or a backward. The first round of a mode (training or evaluation,
...) records the uses of units. Later rounds are compared with the record::

    if log.expected[log.position] is unit:
        log.position += 1
    else:
        log.depart(unit, mode)

``RoundOrder`` expects the order in which the logs of a group (of several models) begin
their rounds. Only a rank without a matching entry communicates (``comm.comparison``)::

    this rank              its next use    action
    follows the record     as recorded     nothing is sent, no wait
    follows the record     another use     depart: write the use to the store, and wait
                                           until all ranks have departed to the same use
    records                any             exchange a checksum of the use with all ranks
    varies (departed       any             exchange a checksum of all uses at the end
    twice before)                          of the round
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import get_ident
from time import time_ns
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.call_order import CallOrder
from composable_fsdp.comm.order_records import Record, keep
from composable_fsdp.comm.ranges import collective_range, profiler
from composable_fsdp.errors import DesyncError
from composable_fsdp.phases import Phase

MOST_OPERATIONS = 1024
"""Number of operations that are kept per process group."""

PATIENCE = timedelta(seconds=2)
"""Time that ``Operation.wait`` blocks before asking whether it never ends."""

_NO_LIMIT = timedelta(0)  # as ``Work.wait`` takes it

NOTHING: Sequence[object] = (None,)
"""The record of a round without a record: ``None`` is no use, so no use matches."""

_CONTEXTS = (24, 6, 2)
"""Numbers of rounds from which ``RoundOrder`` predicts the next, the longest first."""
_MOST_CONTEXTS = 1024
"""Number of contexts that ``RoundOrder`` remembers."""


class Watcher(Protocol):
    """The source of words for an operation whose wait is long, or that has failed."""

    def proof(self, operation: Operation) -> Exception | None:
        """Return the error to raise if ``operation`` never ends; None to wait on."""

    def before(self, operation: Operation) -> None:
        """Check ``operation`` before it is sent, if the log is ``guarded``."""

    def failed(self, operation: Operation, error: RuntimeError) -> Exception:
        """Return the error of this package for ``error`` of the backend."""


class Mark(Protocol):
    """A CUDA event behind a collective."""

    def query(self) -> bool:
        """Return whether the device has reached the event; never waits."""


class OperationLog:
    """The collectives of a process group on this rank, in the order of issue."""

    __slots__ = (
        "__weakref__",
        "device_done",
        "device_moved",
        "device_runs",
        "guarded",
        "is_nccl",
        "marks",
        "name",
        "number",
        "operations",
        "patience",
        "rounds",
        "watcher",
    )

    def __init__(self, group: dist.ProcessGroup, watcher: Watcher) -> None:
        self.name = group.group_name
        """The name of the process group."""
        self.number = 0
        """Number of collectives issued so far."""
        self.operations: deque[Operation] = deque(maxlen=MOST_OPERATIONS)
        # Only gloo's ``Work`` can be waited for in slices: with NCCL, a limit makes the
        # host wait for the GPU.
        # ``init_process_group()`` without a backend, or with ``"cpu:gloo,cuda:nccl"``,
        # creates a group with a backend per device. The name of such a group is neither
        # "nccl" nor "gloo", so the backend of the device is looked up.
        backends = dist.get_backend_config(group)
        sliced = "cpu:gloo" in backends
        self.is_nccl = "cuda:nccl" in backends
        """Whether the group sends CUDA tensors by NCCL."""
        self.patience = PATIENCE if sliced else _NO_LIMIT
        """Limit of a single wait of the host for a collective of CPU tensors."""
        self.watcher = watcher
        # Set by ``comm.watch``.
        self.guarded = False
        """Whether the watcher checks each operation before it is sent."""
        self.rounds = RoundOrder()
        # By event and not by operation: an event that is recorded again stands for the
        # later operation alone. Units write here in every step, without a call.
        self.marks: dict[Mark, int] = {}
        """By CUDA event: the number of the operation behind which it was recorded."""
        # Set by ``comm.progress``.
        self.device_done = self.device_runs = 0
        """Numbers of the last operation that the device is known to have ended, and of
        the operation that the device runs; 0 if none is known."""
        self.device_moved = 0
        """Time in nanoseconds when ``device_done`` has last grown."""


class Operation:
    """A collective that this rank has issued, and the ``Work`` to wait for."""

    __slots__ = (
        "done",
        "dtype",
        "issued",
        "log",
        "number",
        "op",
        "patience",
        "phase",
        "shape",
        "unit",
        "waited",
        "work",
    )

    def __init__(
        self,
        log: OperationLog,
        op: str,
        unit: str | None,
        phase: Phase | str,
        tensor: Tensor | None,
    ) -> None:
        self.log, self.op, self.unit, self.phase = log, op, unit, phase
        self.number = log.number = log.number + 1
        self.waited = self.done = 0
        # ``Any``: ``dist.Work``, whose stubs lack the limit of ``wait``.
        self.work: Any = None
        # Not the tensor itself, because ``log`` must not keep its memory alive.
        if tensor is None:
            self.shape, self.dtype, self.patience = None, None, _NO_LIMIT
        else:
            self.shape, self.dtype = tensor.shape, tensor.dtype
            self.patience = log.patience if tensor.is_cpu else _NO_LIMIT
        self.issued = time_ns()
        log.operations.append(self)

    def send(
        self, start: Callable[..., Any], *args: Any, async_op: bool
    ) -> Operation | None:
        """Call ``start(*args)``, which hands the collective to the backend.

        Returns: the operation if ``async_op``, else None.
        Raises: CollectiveError, if the backend raises.
        Collective: that of ``start``.
        """
        if self.log.guarded:
            self.log.watcher.before(self)
        try:
            # ``with`` costs two calls and the range four, so not without a profiler.
            if profiler._is_profiler_enabled:
                with collective_range(self.op, self.unit):
                    self.work = start(*args)
            else:
                self.work = start(*args)
        except RuntimeError as error:
            raise self.log.watcher.failed(self, error) from error
        if async_op:
            return self
        self.wait()
        return None

    def wait(self) -> None:
        """Wait for the collective: the host on CPU, the current stream on CUDA.

        Raises: CollectiveError, if the backend raises; DesyncError, if another rank
            never sends this collective.
        """
        self.waited = time_ns()
        # The work keeps the buffers alive, and the log must not.
        work, self.work = self.work, None
        if work is not None:
            try:
                if profiler._is_profiler_enabled:
                    with collective_range(f"{self.op}_wait", self.unit):
                        work.wait(self.patience)
                else:
                    work.wait(self.patience)
            except RuntimeError as error:
                self._wait_on(work, error)
        self.done = time_ns()

    @property
    def elapsed(self) -> float:
        """Seconds since the collective was issued; until its end, if it has ended."""
        return ((self.done or time_ns()) - self.issued) / 1e9

    def leave(self) -> None:
        """Let the collective go on without a wait."""
        self.work, self.done = None, time_ns()

    def _wait_on(self, work: Any, error: RuntimeError) -> None:
        """Wait again while the limit, and not the collective, has ended the wait."""
        # An error before the limit is an error of the backend.
        began, least = self.waited, 9e8 * self.patience.total_seconds()
        while least and time_ns() - began >= least:
            # After a completion since the limit, the next wait says how, at once.
            if not work.is_completed() and (never := self.log.watcher.proof(self)):
                raise never
            began = time_ns()
            try:
                work.wait(self.patience)
                return
            except RuntimeError as later:
                error = later
        raise self.log.watcher.failed(self, error) from error


class RoundOrder:
    """The order in which the order logs over a process group begin their rounds."""

    __slots__ = (
        "_expected",
        "_followers",
        "_history",
        "_wider",
        "calls",
        "logs",
        "threads",
        "torn",
    )

    def __init__(self) -> None:
        self.calls = CallOrder()
        """The order of calls over the group."""
        self.threads: set[int] = set()
        """Identities of the threads that have sent over the group."""
        self.logs: list[str] = []
        """The names of all order logs over the group so far, by number of the log."""
        self.torn: dict[int, tuple[int, int]] = {}
        """By number of the log: the round that was abandoned, and the number of its
        uses, if other ranks may wait in collectives that this rank has left out."""
        self._wider: dict[Hashable, RoundOrder] = {}
        self._expected: int | None = None
        self._history: tuple[int, ...] = ()
        """The last rounds: a hash of log and mode each."""
        self._followers: dict[tuple[int, ...], int] = {}
        """By a part of a history: the number of the log that began the next round."""

    def over(self, key: tuple[str, ...]) -> RoundOrder:
        """Return the order of the logs over groups of these names, this group first."""
        # A prediction serves only if all ranks that compare have the same experience,
        # and a replica may evaluate alone, or freeze what others train.
        if len(key) > 1 and key not in self._wider:
            made = self._wider[key] = RoundOrder()
            made.calls, made.logs, made.torn = self.calls, self.logs, self.torn
            made.threads = self.threads
        return self._wider.get(key, self)

    def expected(self) -> int | None:
        """Return the log that will begin a round next; None without experience."""
        history, followers = self._history, self._followers
        self._expected = None
        for length in _CONTEXTS:
            self._expected = followers.get(history[-length:])
            if self._expected is not None:
                break
        return self._expected

    def begin(self, number: int, mode: Hashable) -> None:
        """Note that log ``number`` begins a round in ``mode``, after ``expected``."""
        history, followers = self._history, self._followers
        if self._expected != number:
            for length in _CONTEXTS:
                keep(followers, history[-length:], number, most=_MOST_CONTEXTS)
        self._history = (*history[1 - _CONTEXTS[0] :], hash((number, mode)))


class OrderLog:
    """The order of uses in a direction (forward or backward) over process groups."""

    # All logs over the first group share ``rounds``.

    __slots__ = (
        "_entries",
        "_last",
        "_open",
        "_record",
        "_recording",
        "_records",
        "_run",
        "_successors",
        "_varies",
        "call",
        "comparison",
        "expected",
        "number",
        "position",
        "round",
        "rounds",
    )

    def __init__(
        self,
        name: str,
        rounds: RoundOrder,
        comparison: Any,
        call: Hashable = None,
    ) -> None:
        self.rounds, self.comparison = rounds, comparison  # an ``OrderComparison``
        self.call = call
        """A round as a call (``comm.meeting.Call``); None in backward."""
        self.number = len(rounds.logs)
        """The number of this log among the logs over its group."""
        rounds.logs.append(name)
        self.round = 0
        """Number of the current round, or of the last round."""
        self.expected: Sequence[object] = NOTHING
        """The recorded uses of this round, then ``None``."""
        self.position = 0
        """Index of the next use in ``expected``."""
        self._open = self._recording = self._varies = False
        self._entries: list[object] = []
        """Uses of this round, while this rank records."""
        self._records: dict[Hashable, Record] = {}
        """The record of each mode."""
        self._record = Record()
        """The record of the mode of this round."""
        self._last: Hashable = None
        """The mode of the current round, or of the last round."""
        self._run = 0
        """Number of consecutive rounds with mode ``_last``."""
        self._successors: dict[tuple[Hashable, int], Hashable] = {}
        """By mode and length of its run: the mode that followed."""

    @property
    def is_open(self) -> bool:
        """Whether a round is in progress."""
        return self._open

    def depart(self, use: object, mode: Hashable) -> None:
        """Record a use that is not the expected use; call before its collective.

        The first use of a round always calls this method, which begins the round.
        ``mode`` is read only then.

        Collective: while a round is recorded, one all-gather of 8 bytes. If a record is
            left, none: waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if another rank does something else.
        """
        # The first use of a round has no record to compare with until the mode is
        # known.
        if not self._open:
            self._begin(mode)
            if self.expected[self.position] == use:
                self.position += 1
                return
        if not self._recording:
            # From here on this rank records; the uses so far equal the old record.
            wanted = self.expected[self.position]
            self._entries = list(self.expected[: self.position])
            self.expected, self.position, self._recording = NOTHING, 0, True
            index = len(self._entries)
            self.comparison.depart(self.round, index, use, wanted, self._record.since)
            self._record.count_departure()
        elif not self._varies:
            # ``_alike``, inlined: the first round comes here at every use.
            try:
                self.comparison.compare(self.round, len(self._entries), use)
            except DesyncError:
                self._close()
                raise
        self._entries.append(use)

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """Close the round if the block raises, which it does on all ranks or none."""
        # No rank waits for another then, so that the next round needs no meeting.
        try:
            yield
        except DesyncError:
            self._close()
            raise

    def end(self) -> None:
        """End the round, if a round is in progress.

        Fewer uses than recorded are a departure, too.

        Collective: as ``depart``.
        Raises: DesyncError, as ``depart``.
        """
        if not self._open:
            return
        if self._recording or self.expected[self.position] is not None:
            self.depart(None, None)
            if self._varies:
                with self._alike():
                    self.comparison.compare_round(self.round, self._entries)
            self._record.update(self._entries, self.round, varies=self._varies)
            keep(self._records, self._last, self._record)
        # Only a round that wrote visits the store, for earlier rounds, too.
        if self.comparison.said:
            self.comparison.clear(self.round, dropped=False)
        self._close()

    def drop(self) -> None:
        """Abandon the round in progress, if any; the records stay as they were.

        If the round has further uses, the next round over the group begins by a meeting
        of all ranks.
        """
        # The number of further uses is not known while this rank records.
        if self._recording or (self._open and self.expected[self.position] is not None):
            uses = len(self._entries) if self._recording else self.position
            self.rounds.torn[self.number] = self.round, uses
        if self.comparison.said:
            self.comparison.clear(self.round, dropped=True)
        self._close()

    def _close(self) -> None:
        """Leave the round that has ended or was abandoned."""
        self._open = self._recording = self._varies = False
        self.expected, self.position = NOTHING, 0

    def _begin(self, mode: Hashable) -> None:
        """Begin a round: compare its begin with the expected begin, find the record."""
        rounds = self.rounds
        rounds.threads.add(get_ident())
        if self.call is not None:
            rounds.calls.begin_forward(self.number, self.call)
        self.round += 1
        self._open = True
        if rounds.torn:
            self.comparison.meet_after_tear(self.round, rounds.torn)
            rounds.torn.clear()
        # The mode of a round is predicted from the mode before, and from how many
        # rounds in a row had that mode: an evaluation after every 100 steps is
        # predicted from the second time on. Without experience, a mode that ran twice
        # is expected again.
        usual = self._last if self._run > 1 else None
        predicted = self._successors.get((self._last, self._run), usual)
        number = rounds.expected()
        # All ranks have the same experience. Without experience, all ranks compare.
        if number is None or (number == self.number and predicted is None):
            with self._alike():
                self.comparison.compare_begin(self.round, mode)
        # Ranks whose prediction comes true send nothing, so this rank has to wait for
        # all ranks to begin the same round.
        elif number != self.number or predicted != mode:
            other = rounds.logs[number] if number != self.number else ""
            self.comparison.depart_begin(
                self.round, mode, other=other, wanted=predicted
            )
        rounds.begin(self.number, mode)
        if predicted != mode:
            keep(self._successors, (self._last, self._run), mode)
        self._run = self._run + 1 if mode == self._last else 1
        self._last = mode
        self._entries = []
        self._record = record = self._records.get(mode) or Record()
        self._varies = record.departures > 1
        self._recording = record.uses is None or self._varies
        self.expected = NOTHING if self._recording else record.uses or NOTHING
        self.position = 0
