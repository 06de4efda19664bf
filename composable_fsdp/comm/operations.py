"""The collectives that this rank issues over each process group, and their records.

The ranks of a group issue their collectives in the same order, so the n-th of a rank
pairs with the n-th of every other. Private: ``profiler._is_profiler_enabled``, read
before a range is opened; checked on torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from threading import Thread, current_thread
from time import time_ns
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.groups import (
    NO_LIMIT,
    GroupRef,
    operation_log,
    operation_logs,
)
from composable_fsdp.errors import PACKAGE, CollectiveError
from composable_fsdp.naming import ROOT_NAME, quoted
from composable_fsdp.phases import Phase

profiler: Any = torch.autograd.profiler
"""The module whose ``_is_profiler_enabled`` tells whether a profiler runs."""

OPEN: dict[tuple[str, int], list[tuple[str, Any]]] = {}
"""The open ranges by kind and id of the tree's context, innermost last."""

# A unit is IDLE in the step only while it is prefetched by the forward of another unit.
PHASES = {
    Phase.IDLE: "forward",
    Phase.FORWARD: "forward",
    Phase.BACKWARD_PRE: "backward",
    Phase.BACKWARD_POST: "backward",
    Phase.SUMMON: "unshard_params",
}
"""The phase of a unit as records and messages name it."""

UNEVEN = (
    "If ranks have different numbers of batches, composable_fsdp.features."
    "even_batches(loader, model) gives them the same number of steps."
)
"""The way out of the most frequent wait in a forward."""


NOTED: list[Callable[[Operation, Sequence[Tensor]], None]] = []
"""The last is called with each operation, and with the buffers or tensors it sends."""


class Operation:
    """A collective that this rank has issued, and the ``Work`` to wait for."""

    __slots__ = (
        *("done", "dtype", "issued", "log", "number", "op", "patience", "phase"),
        *("shape", "unit", "waited", "work"),
    )

    def __init__(
        self,
        log: GroupRef,
        op: str,
        unit: str | None,
        phase: Phase | str,
        tensors: Sequence[Tensor],
    ) -> None:
        self.log, self.op, self.unit, self.phase = log, op, unit, phase
        self.number = log.number = log.number + 1
        self.waited = self.done = 0
        # ``Any``: ``dist.Work``, whose stubs lack the limit of ``wait``.
        self.work: Any = None
        # Not the tensor itself, because ``log`` must not keep its memory alive.
        if not tensors:
            self.shape, self.dtype, self.patience = None, None, NO_LIMIT
        else:
            self.shape, self.dtype = tensors[0].shape, tensors[0].dtype
            self.patience = log.patience if tensors[0].is_cpu else NO_LIMIT
        self.issued = time_ns()
        log.operations.append(self)
        if NOTED:
            NOTED[-1](self, tensors)

    def send(
        self, start: Callable[..., Any], *args: Any, async_op: bool
    ) -> Operation | None:
        """Call ``start(*args)``, which hands the collective to the backend."""
        if self.log.guarded:
            self.log.recorder.issued(self)
        try:
            # ``with`` costs two calls and the range four, so not without a profiler.
            if profiler._is_profiler_enabled:
                with profiler.record_function(range_name(self.op, self.unit)):
                    self.work = start(*args)
            else:
                self.work = start(*args)
        except RuntimeError as error:
            raise _failed(self, error) from error
        if async_op:
            return self
        self.wait()
        return None

    def wait(self) -> None:
        """Wait for the collective: the host on CPU, the current stream on CUDA.

        Raises: CollectiveError; DesyncError, if another rank never sends it.
        """
        self.waited = time_ns()
        # The work keeps the buffers alive, and the log must not.
        work, self.work = self.work, None
        if work is not None:
            try:
                if profiler._is_profiler_enabled:
                    name = range_name(f"{self.op}_wait", self.unit)
                    with profiler.record_function(name):
                        work.wait(self.patience)
                else:
                    work.wait(self.patience)
            except RuntimeError as error:
                self._wait_on(work, error)
        self.done = time_ns()

    @property
    def state(self) -> str:
        """How far the host knows that the collective is."""
        if self.done:
            return "done"
        # A collective without a ``Work`` blocks while it is issued.
        return "running" if self.waited or self.work is None else "issued"

    def detach(self) -> None:
        """Let the collective go on without a wait."""
        self.work, self.done = None, time_ns()

    def _wait_on(self, work: Any, error: RuntimeError) -> None:
        """Wait again while the limit, and not the collective, has ended the wait."""
        # An error before the limit is an error of the backend.
        began, least = self.waited, 9e8 * self.patience.total_seconds()
        while least and time_ns() - began >= least:
            # After a completion since the limit, the next wait says how, at once.
            if not work.is_completed() and (never := self.log.recorder.awaited(self)):
                raise never
            began = time_ns()
            try:
                work.wait(self.patience)
                return
            except RuntimeError as later:
                error = later
        raise _failed(self, error) from error


def _failed(operation: Operation, error: RuntimeError) -> Exception:
    """Return the error of this package for ``error`` of the backend."""
    recorder = operation.log.recorder
    if (cause := recorder.failed(operation)) is not None:
        return cause
    # The raw error names sockets or streams, so begin with what the user knows.
    record = OperationRecord.of(operation)
    elapsed = ((operation.done or time_ns()) - operation.issued) / 1e9
    uneven = f" {UNEVEN}" if record.phase == "forward" else ""
    last = [OperationRecord.of(each) for each in list(operation.log.operations)[-3:]]
    return CollectiveError(
        f"{record.title[:1].upper()}{record.title[1:]} failed on this rank after "
        f"{elapsed:.3g} s: "
        f"{str(error).strip().rstrip('.')}. {recorder.last_words()}The last operations "
        f"of this rank: {'; '.join(map(str, last))}. Look first at the output of "
        f"the rank that ended or raised earliest.{uneven} The shards of this rank "
        "are unharmed: composable_fsdp.save writes them without this group.",
        unit=record.unit,
        op=record.op,
        phase=record.phase,
        elapsed=elapsed,
    )


class OperationRecord(NamedTuple):
    """A collective that this rank has issued, as ``recent_operations`` returns it."""

    group: str
    """The name of the process group."""
    number: int
    """Position in the sequence of the group's collectives, from 1 on."""
    op: str
    """``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ..."""
    unit: str
    """FQN of the unit from the root, quoted; empty if no single unit is concerned."""
    phase: str
    """The phase of the unit in the step; without a unit, the function that the program
    has called."""
    dtype: str
    """Dtype of the buffer; ``"object"`` for pickled values."""
    numel: int
    """Elements of the largest buffer (the full buffer of an all-gather); 0 for objects.
    """
    issued: float
    """Time in seconds since the epoch when the collective was handed to the backend."""
    waited: float | None
    """Time when this rank began to wait; None if this rank has not waited."""
    done: float | None
    """Time when the wait ended: on CPU, the collective has ended; on CUDA, the current
    stream was ordered behind the collective. None before."""
    state: str
    """``"issued"``, ``"running"`` (this rank waits) or ``"done"``, as ``done`` says."""

    def __str__(self) -> str:
        about = " ".join(filter(None, [self.op, self.unit]))
        at = datetime.fromtimestamp(self.issued).strftime("%H:%M:%S.%f")[:-3]
        size = f", {self.numel:,} x {self.dtype}" if self.numel else ""
        end = "not waited for" if self.waited is None else "waiting"
        if self.done is not None and self.waited is not None:
            end = f"done, waited {1e3 * (self.done - self.waited):.3g} ms"
        return f"{self.number} {about} ({self.phase}{size}): issued {at}, {end}"

    @classmethod
    def of(cls, operation: Operation) -> OperationRecord:
        """Return a copy of ``operation``."""
        phase, shape, dtype = operation.phase, operation.shape, operation.dtype
        return cls(
            operation.log.name,
            operation.number,
            operation.op,
            "" if operation.unit is None else quoted(operation.unit),
            PHASES[phase] if isinstance(phase, Phase) else phase,
            "object" if dtype is None else str(dtype).removeprefix("torch."),
            0 if shape is None else shape.numel(),
            operation.issued / 1e9,
            operation.waited / 1e9 if operation.waited else None,
            operation.done / 1e9 if operation.done else None,
            operation.state,
        )

    @property
    def title(self) -> str:
        """The collective as messages name it."""
        about = f" of {self.unit}" if self.unit else ""
        return (
            f"the {self.op.replace('_', '-')}{about} ({self.phase}; operation "
            f"{self.number} of process group {self.group!r})"
        )


def recent_operations(
    group: dist.ProcessGroup | None = None,
) -> tuple[OperationRecord, ...]:
    """Return the last collectives that this package has issued on this rank.

    The last 1,024 collectives of each process group are kept; all ranks of a group
    issue equal sequences. ``print(*recent_operations(), sep="\\n")`` shows a line each.

    Args:
        group: the process group. Default None: all process groups, in the order of
            issue.

    Returns: a record per collective, oldest first.
    """
    logs = operation_logs() if group is None else [operation_log(group)]
    # ``list`` of a deque is atomic: another thread may append meanwhile.
    found = [OperationRecord.of(each) for log in logs for each in list(log.operations)]
    return tuple(sorted(found, key=lambda record: record.issued))


def begin(
    op: str,
    group: dist.ProcessGroup,
    tensors: Sequence[Tensor] = (),
    phase: str | None = None,
) -> Operation:
    """Return a new operation that is not about a single unit, in the group's log."""
    log = operation_log(group)
    # Threads may send in another order than they number, so what two threads do is no
    # proof of a deadlock (``guard.watch``).
    note_thread(log.threads)
    return Operation(log, op, None, phase or _calling(), tensors)


def note_thread(threads: set[Thread]) -> None:
    """Add this thread to ``threads``."""
    this = current_thread()
    if this not in threads:
        # A thread that has ended is kept no longer than until the next one comes.
        threads.difference_update([t for t in list(threads) if not t.is_alive()])
        threads.add(this)


def _calling() -> str:
    """Return the name of the outermost function of this package on the stack."""
    name, length = "", len(PACKAGE)
    frame: FrameType | None = sys._getframe(1)
    # Hooks of torch may lie between functions of this package, so all frames are read.
    # Only collectives outside the common step come here.
    while frame is not None:
        # Not ``startswith``, which would be a call for each frame.
        if frame.f_code.co_filename[:length] == PACKAGE:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


RECORDING: list[Callable[..., None]] = []
"""Called with groups before their first collective, and whether to wait for all."""


def running_unit(stage: str) -> str | None:
    """Return the name of the unit that runs in ``stage``; None if no range is open."""
    # Checkpointing runs forwards in backward, whose ranges are inside.
    for kind in dict.fromkeys((stage, "forward", "backward")):
        for (each, _), ranges in OPEN.items():
            if each == kind and ranges:
                return ranges[-1][0]
    return None


def range_name(kind: str, unit: str | None) -> str:
    """Return the name of a range; ``unit`` is None for all units together."""
    # The name of the root has parentheses of its own.
    of_unit = f" ({unit})" if unit else "" if unit is None else f" {ROOT_NAME}"
    return f"composable_fsdp::{kind}{of_unit}"


def begin_range(kind: str, tree: object, unit: str) -> None:
    """Open the range of a unit's forward or backward, nested as the units are."""
    # The range of a unit beside this one is closed; those of units below are opened
    # again inside the new range.
    opened = OPEN.setdefault((kind, id(tree)), [])
    below: list[str] = []
    while opened and not _is_at_or_below(unit, opened[-1][0]):
        name, record = opened.pop()
        record.__exit__(None, None, None)
        # The output of the last unit of a model is an output of the root, too, and the
        # hook of the root runs right after that of the unit, which is empty so far.
        if _is_at_or_below(name, unit):
            below.append(name)
    for each in (unit, *reversed(below)):
        # Torch's own ranges of a backward are those of nodes, so a range over several
        # nodes begins inside a node's range and ends inside another.
        record = profiler.record_function(range_name(kind, each))
        record.__enter__()
        opened.append((each, record))


def _is_at_or_below(unit: str, above: str) -> bool:
    """Return whether the name ``unit`` is that of ``above`` or of a module below."""
    return not above or f"{unit}.".startswith(f"{above}.")


def end_range(kind: str, tree: object, unit: str) -> None:
    """Close the innermost range of the unit, if any, and the ranges inside."""
    opened = OPEN.get((kind, id(tree)), [])
    # The profiler may have started after the begin.
    while any(name == unit for name, _ in opened):
        name, record = opened.pop()
        record.__exit__(None, None, None)
        if name == unit:
            break
    # An empty table tells callers that nothing is left to close.
    if not opened:
        OPEN.pop((kind, id(tree)), None)


def end_all_ranges(tree: object) -> None:
    """Close all ranges of a tree, which an error may have left open."""
    # The innermost first, as torch expects of ranges on a thread.
    for kind in ("forward", "backward"):
        for _, record in reversed(OPEN.pop((kind, id(tree)), [])):
            record.__exit__(None, None, None)
