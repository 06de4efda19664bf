"""Saves while training continues: ``async_save`` copies the values, a thread writes.

The host memory belongs to the module of the save, and is reused by the next.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage.save import Job, SaveOptions, prepare, write
from composable_fsdp.storage.team import SaveFuture, Team, meet_team, pending, team_of
from composable_fsdp.storage.writer import Piece, host_buffer, is_plain


class SaveMemory:
    """The buffer of a module's asynchronous saves; used by a single save at a time."""

    __slots__ = ("__weakref__", "buffer", "is_used")

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.is_used = True
        """Whether a thread still writes the values in the buffer."""

    def reserve(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return ``nbytes`` of the buffer, which grows if needed."""
        if self.buffer is None or self.buffer.numel() < nbytes:
            self.buffer = None
            self.buffer = host_buffer(nbytes, pinned=pinned)
        return self.buffer[:nbytes]


_memories: weakref.WeakKeyDictionary[nn.Module, SaveMemory] = (
    weakref.WeakKeyDictionary()
)


def take_memory(module: nn.Module) -> SaveMemory:
    """Return the memory of ``module``, marked as used."""
    memory = _memories.get(module)
    # A save of the same module by other ranks may still write the values of its call.
    if memory is None or memory.is_used:
        memory = _memories[module] = SaveMemory()
    memory.is_used = True
    return memory


def free_save_memory(module: nn.Module) -> int:
    """Free the host memory that ``async_save`` keeps for the next save of ``module``.

    If a save is still writing, the memory is freed when the save ends. Returns: the
    number of bytes on this rank; 0 if the module has no such memory.

    >>> async_save("runs/step-400", model, optimizer).result()
    >>> free_save_memory(model) > 0, free_save_memory(model)
    (True, 0)
    """
    # The thread of a save that is not done holds the memory, and nothing else does.
    memory = _memories.pop(module, None)
    return 0 if memory is None or memory.buffer is None else memory.buffer.numel()


# Buffers that are made in inference mode could not be written outside of the mode.
@torch.inference_mode(False)
@torch.no_grad()
def snapshot(memory: SaveMemory, pieces: Sequence[Piece]) -> list[Piece]:
    """Copy the values of ``pieces`` into ``memory``; return pieces of the copies."""
    tensors = [part for piece in pieces for part in piece.pieces()]
    devices = {part.device for part in tensors if part.device.type == "cuda"}
    nbytes = sum(part.nbytes for part in tensors)
    buffer = memory.reserve(nbytes, pinned=bool(devices))
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        # Without an operator: dispatch takes longer than a small copy, and threads that
        # share a large one wait for each other on busy processors.
        if is_plain(tensor):
            to = buffer.data_ptr() + begin
            ctypes.memmove(to, tensor.data_ptr(), end - begin)
        else:
            into = buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            into.copy_(tensor, non_blocking=True)
        begin = end
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    copies, end = [], 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        copies.append(replace(piece, pieces=partial(list, [buffer[begin:end]])))
    return copies


def async_save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    options: SaveOptions | None = None,
) -> Future[None]:
    """Save as ``save`` does, but in the background; return after the values are copied.

    The checkpoint holds the values at the time of the call. Host memory (pinned, if the
    values are on a CUDA device) holds a single copy of what this rank writes,
    ``ShardingPlan.save_bytes``, and is kept for the next call (``free_save_memory``).

    The future ends when the checkpoint is committed, or with the error that ``save``
    would raise, the same on every rank. The next ``save``, ``async_save`` or ``load``
    on the same ranks waits for it, and raises its error if no rank has asked for it.
    Keep the process group alive until the future has ended.

    Args: those of ``save``.

    Returns: a future with the result None. The future cannot be cancelled.
    Collective: as ``save``. The first exchange happens in the call, the others in the
    background over a second private gloo group, which the first call makes.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank, for errors
    that are found before any file is written.
    """
    meet_team(module, "async_save")
    team = team_of(module)
    # The thread has a gloo group of its own, so the two threads' exchanges never mix.
    behind = team_of(module, "asynchronous checkpoint")
    job = prepare(team, path, module, optim, extra, options)
    error: Exception | None = None
    interrupt: BaseException | None = None
    memory = take_memory(module)
    try:
        job.pieces = snapshot(memory, job.pieces)
    except Exception as raised:
        # Not raised here, where only this rank would stop: the thread tells all ranks.
        error = raised
    except BaseException as raised:
        # Ctrl-C: the other ranks have begun, and their next save would wait.
        interrupt = raised
        error = CheckpointError(f"async_save was interrupted ({raised!r}).")
    future = SaveFuture(job.path)
    # As running, so that no caller can cancel it: the other ranks wait for this rank.
    future.set_running_or_notify_cancel()
    pending[team.ranks] = future
    # Not a daemon thread: the interpreter waits at exit until all is written.
    thread = threading.Thread(
        target=_run,
        args=(behind, job, error, future, memory),
        name="composable_fsdp save",
    )
    try:
        thread.start()
    except RuntimeError:  # No thread is available; the other ranks have begun.
        _run(behind, job, error, future, memory)
    if interrupt is not None:
        raise interrupt
    return future


def _run(
    team: Team,
    job: Job,
    error: Exception | None,
    future: SaveFuture,
    memory: SaveMemory,
) -> None:
    """Write and commit; free ``memory`` for the next save, then end ``future``."""
    failure: BaseException | None = None
    try:
        write(team, job, error)
    except BaseException as raised:
        failure = raised
    # Before the future ends, for which the next save waits, which reuses the memory.
    memory.is_used = False
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(None)
