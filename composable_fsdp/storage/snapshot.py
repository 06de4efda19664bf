"""Host memory of asynchronous saves: copies of the values at the time of the call.

::

    pieces    [shard]  [m_1, zeros, m_2]  [step]        in the order of the file
    memory    |shard  |m_1|m_2           |step|         a buffer that is reused
    written   |-------|---- zeros -------|----|         by a thread, run by run

The memory belongs to the module of the save: it is allocated by the first save, reused
by the next, and freed with the module or by ``free_save_memory``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from composable_fsdp.storage.staging import host_buffer, is_plain
from composable_fsdp.storage.writer import Piece


class SaveMemory:
    """The buffer of a module's asynchronous saves; used by a single save at a time."""

    __slots__ = ("__weakref__", "buffer", "is_used")

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.is_used = False
        """Whether a thread still writes the values in the buffer."""

    def reserve(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return ``nbytes`` of the buffer, which grows if needed."""
        if self.buffer is None or self.buffer.numel() < nbytes:
            # Freed first: both buffers together would be two copies of the values.
            self.buffer = None
            self.buffer = host_buffer(nbytes, pinned=pinned)
        return self.buffer[:nbytes]

    def release(self) -> None:
        """Let the next save use the buffer: its values were written, or failed."""
        self.is_used = False


_memories: weakref.WeakKeyDictionary[nn.Module, SaveMemory] = (
    weakref.WeakKeyDictionary()
)
"""The memory of each module that ``async_save`` was called for."""


def take_memory(module: nn.Module) -> SaveMemory:
    """Return the memory of ``module``, marked as used until ``release``."""
    memory = _memories.get(module)
    # A save of the same module by other ranks may still write the values of its call.
    if memory is None or memory.is_used:
        memory = _memories[module] = SaveMemory()
    memory.is_used = True
    return memory


def free_save_memory(module: nn.Module) -> int:
    """Free the host memory that ``async_save`` keeps for the next save of ``module``.

    If an asynchronous save is still writing, the memory is freed when the save ends.
    The next ``async_save`` allocates the memory again.

    Args:
        module: the module that was passed to ``async_save``.

    Returns: the number of bytes on this rank; 0 if the module has no such memory.
    Collective: none.

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
    """Copy the values of ``pieces`` into ``memory``; return pieces of the copies.

    On return, training may change the originals. The memory has exactly the bytes of
    the values; zeros between them take none.
    """
    # Listed once: pieces may be made on each call, and the sizes are needed first.
    found = [list(piece.pieces()) for piece in pieces]
    tensors = [part for parts in found for part in parts if isinstance(part, Tensor)]
    nbytes = sum(part.nbytes for part in tensors)
    devices = {part.device for part in tensors if part.device.type == "cuda"}
    buffer = memory.reserve(nbytes, pinned=bool(devices))
    _copy(tensors, buffer)
    for device in devices:
        # Once for all copies: each waits behind the others on the device's stream.
        torch.cuda.current_stream(device).synchronize()
    copies, end = [], 0
    for piece, parts in zip(pieces, found, strict=True):
        runs, end = _runs(parts, buffer, end)
        copies.append(replace(piece, pieces=_Parts(runs)))
    return copies


class _Parts:
    """The values of a piece, already in host memory."""

    def __init__(self, parts: list[Tensor | int]) -> None:
        self._parts = parts

    def __call__(self) -> Iterable[Tensor | int]:
        return self._parts


def _copy(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy ``tensors``, one behind the other, into the bytes of ``buffer``."""
    address, begin = buffer.data_ptr(), 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        # Without an operator: dispatch takes longer than the copy of a small tensor.
        # And the threads that share a large tensor wait for each other if the
        # processors are busy, which took ten times as long as a single thread.
        if is_plain(tensor):
            ctypes.memmove(address + begin, tensor.data_ptr(), end - begin)
        else:
            into = buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            into.copy_(tensor, non_blocking=True)
        begin = end


def _runs(
    parts: Iterable[Tensor | int], buffer: Tensor, begin: int
) -> tuple[list[Tensor | int], int]:
    """Return the bytes of a piece and the end in ``buffer``; neighbours are joined."""
    found: list[Tensor | int] = []
    end = begin
    for part in parts:
        if isinstance(part, Tensor):
            end += part.nbytes
        elif part:
            # Joined, because the thread takes the interpreter from the training for
            # each part that it writes.
            if end > begin:
                found.append(buffer[begin:end])
            found.append(part)
            begin = end
    if end > begin:
        found.append(buffer[begin:end])
    return found, end
