"""Records of collectives for people: ``recent_operations`` and the words of errors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.sequence import Operation, OperationLog, note_thread
from composable_fsdp.errors import CollectiveError, FSDPError
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase


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
            _state(operation),
        )

    @property
    def predicate(self) -> str:
        """What the rank does that waits in the collective."""
        return f"is in {self.title[:1].lower()}{self.title[1:]}"

    @property
    def title(self) -> str:
        """The collective as messages name it."""
        about = f" of {self.unit}" if self.unit else ""
        return (
            f"The {self.op.replace('_', '-')}{about} ({self.phase}; operation "
            f"{self.number} of process group {self.group!r})"
        )


def _state(operation: Operation) -> str:
    """Return the state of a collective, as the host knows it."""
    if operation.done:
        return "done"
    # A collective without a ``Work`` blocks while it is issued.
    return "running" if operation.waited or operation.work is None else "issued"


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


class _Ours(dict[str, bool]):
    """By file name: whether the file is in this package."""

    def __missing__(self, name: str) -> bool:
        found = self[name] = Path(name).is_relative_to(Path(__file__).parents[1])
        return found


_ours = _Ours()


def calling() -> str:
    """Return the name of the outermost function of this package on the stack."""
    name = ""
    frame: FrameType | None = sys._getframe(1)
    # Hooks of torch may lie between functions of this package, so all frames are read.
    # Only collectives outside the common step come here.
    while frame is not None:
        if _ours[frame.f_code.co_filename]:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


class Reporter:
    """The errors of a process group whose other ranks are not asked."""

    def awaited(self, operation: Operation) -> Exception | None:
        """Return None: this rank does not know what other ranks do."""
        return None

    def issued(self, operation: Operation) -> None:
        """Do nothing: no other rank can be asked."""

    def raises(self, text: str, *, owes: bool) -> None:
        """Do nothing: no other rank can be told."""

    def last_words(self) -> str:
        """Return what the other ranks said last: nothing."""
        return ""

    def failed(self, operation: Operation, error: RuntimeError) -> FSDPError:
        """Return the error of this package for ``error`` of the backend."""
        # The raw error names sockets or streams, so begin with what the user knows.
        record = OperationRecord.of(operation)
        uneven = f" {UNEVEN}" if record.phase == "forward" else ""
        return CollectiveError(
            f"{record.title} failed on this rank after {operation.elapsed:.3g} s: "
            f"{str(error).strip().rstrip('.')}. {self.last_words()}"
            f"{last_operations(operation.log)} Look first at the output of the rank "
            f"that ended or raised earliest.{uneven} The shards of this rank are "
            "unharmed: composable_fsdp.save writes them without this process group.",
            unit=record.unit,
            op=record.op,
            phase=record.phase,
            elapsed=operation.elapsed,
        )


_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, OperationLog] = (
    weakref.WeakKeyDictionary()
)


def operation_log(group: dist.ProcessGroup) -> OperationLog:
    """Return the log of ``group``."""
    # Weak keys: a destroyed group takes its log along.
    found = _logs.get(group)
    if found is None:
        found = _logs[group] = OperationLog(group, Reporter())
    return found


def operation_logs() -> list[OperationLog]:
    """Return the logs of all process groups that exist."""
    return list(_logs.values())


RECORDING: list[Callable[..., None]] = []
"""What ``record`` calls, with its arguments; ``features.defaults`` fills the list."""


def record(groups: Iterable[dist.ProcessGroup], *, agree: bool = False) -> None:
    """Give the logs of ``groups`` the recorder that the program has chosen.

    With ``agree``, waits in the store for all ranks of each group, in the first call.
    Raises: DesyncError, if they do not come.
    """
    for each in RECORDING:
        each(groups, agree=agree)


def leave(group: dist.ProcessGroup, text: str, *, owes: bool = False) -> None:
    """Tell that this rank raises ``text`` and, if it ``owes``, that none can go on."""
    operation_log(group).recorder.raises(text, owes=owes)


def waiting_in(log: OperationLog) -> Operation | None:
    """Return the operation in which this rank waits; None if it waits in none."""
    # ``list`` of a deque is atomic: the main thread may append meanwhile.
    last = reversed(list(log.operations))
    return next((each for each in last if _state(each) == "running"), None)


def begin(
    op: str,
    group: dist.ProcessGroup,
    tensor: Tensor | None = None,
    phase: str | None = None,
) -> Operation:
    """Return a new operation that is not about a single unit, in the group's log."""
    log = operation_log(group)
    # Threads may send in another order than they number, so what two threads do is no
    # proof of a deadlock (``guard.watch``).
    note_thread(log.threads)
    return Operation(log, op, None, phase or calling(), tensor)


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


def last_operations(log: OperationLog, count: int = 3) -> str:
    """Return a sentence with the last ``count`` operations of ``log``, for errors."""
    last = [str(OperationRecord.of(each)) for each in list(log.operations)[-count:]]
    return f"The last operations of this rank: {'; '.join(last)}." if last else ""
