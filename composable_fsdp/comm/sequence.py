"""The sequence of collectives over a process group on this rank.

Every collective of this package is an ``Operation`` in the ``OperationLog`` of its
process group, whichever tree, direction or call sends the collective. The ranks of a
group issue their collectives in the same order, so the n-th operation of a rank pairs
with the n-th operation of every other rank::

    number  op              unit       phase or call     issued   waited   done
    410     all_gather      blocks.1   forward           .        .        .
    411     reduce_scatter  blocks.2   backward          .        .        .
    412     all_reduce                 clip_grad_norm_   .        .
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from threading import Thread, current_thread
from time import time_ns
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.ranges import collective_range, profiler
from composable_fsdp.phases import Phase

MOST_OPERATIONS = 1024
"""Number of operations that are kept per process group."""

PATIENCE = timedelta(seconds=2)
"""Time that ``Operation.wait`` blocks before asking whether it never ends."""

_NO_LIMIT = timedelta(0)  # as ``Work.wait`` takes it


class Recorder(Protocol):
    """The seam at which ``features.guard`` sees the operations of a group."""

    def issued(self, operation: Operation) -> None:
        """Check ``operation`` before it is sent, if the log is ``guarded``."""

    def awaited(self, operation: Operation) -> Exception | None:
        """Return the error that ends a long wait, if ``operation`` never ends."""

    def raises(self, text: str, *, owes: bool) -> None:
        """Tell the other ranks that this rank raises ``text``."""

    def failed(self, operation: Operation, error: RuntimeError) -> Exception:
        """Return the error of this package for ``error`` of the backend."""


class Mark(Protocol):
    """A CUDA event behind a collective."""

    def query(self) -> bool:
        """Return whether the device has reached the event; never waits."""


class OperationLog:
    """The collectives of a process group on this rank, in the order of issue."""

    __slots__ = (
        *("__weakref__", "guarded", "is_nccl", "marks", "name", "number"),
        *("operations", "patience", "recorder", "threads"),
    )

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        self.name = group.group_name
        """The name of the process group."""
        self.number = 0
        """Number of collectives issued so far."""
        self.operations: deque[Operation] = deque(maxlen=MOST_OPERATIONS)
        # By device: ``"cpu:gloo,cuda:nccl"`` makes a group that is neither of the two.
        backends = dist.get_backend_config(group)
        self.is_nccl = "cuda:nccl" in backends
        """Whether the group sends CUDA tensors by NCCL."""
        # Only gloo's ``Work`` can be waited for in slices: with NCCL, a limit makes the
        # host wait for the GPU.
        self.patience = PATIENCE if "cpu:gloo" in backends else _NO_LIMIT
        """Limit of a single wait of the host for a collective of CPU tensors."""
        self.recorder = recorder
        # Set by ``guard.watch``.
        self.guarded = False
        """Whether the recorder checks each operation before it is sent."""
        # Not identities, which an idle thread may get from one that has ended.
        self.threads: set[Thread] = set()
        """The threads that have sent over the group."""
        # By event and not by operation: an event that is recorded again stands for the
        # later operation alone. Units write here in every step, without a call.
        self.marks: dict[Mark, int] = {}
        """By CUDA event: the number of the operation behind which it was recorded."""


def note_thread(threads: set[Thread]) -> None:
    """Add this thread to ``threads``."""
    this = current_thread()
    if this not in threads:
        # A thread that has ended is kept no longer than until the next one comes.
        for each in list(threads):
            if not each.is_alive():
                threads.discard(each)
        threads.add(this)


class Operation:
    """A collective that this rank has issued, and the ``Work`` to wait for."""

    __slots__ = (
        *("done", "dtype", "issued", "log", "number", "op", "patience", "phase"),
        *("shape", "unit", "waited", "work"),
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
        """Call ``start(*args)``, which hands the collective to the backend."""
        if self.log.guarded:
            self.log.recorder.issued(self)
        try:
            # ``with`` costs two calls and the range four, so not without a profiler.
            if profiler._is_profiler_enabled:
                with collective_range(self.op, self.unit):
                    self.work = start(*args)
            else:
                self.work = start(*args)
        except RuntimeError as error:
            raise self.log.recorder.failed(self, error) from error
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
            if not work.is_completed() and (never := self.log.recorder.awaited(self)):
                raise never
            began = time_ns()
            try:
                work.wait(self.patience)
                return
            except RuntimeError as later:
                error = later
        raise self.log.recorder.failed(self, error) from error
