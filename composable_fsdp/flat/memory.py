"""Allocating and freeing the storage of a tensor while views of the tensor stay valid.

A view keeps offset and strides when the storage is resized, so views are created
once. Reading a view of an empty storage raises or crashes: before a caller frees a
tensor, the caller must make the views unreachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from composable_fsdp.comm.device import copy_async

_STAY = nullcontext()
"""Shared null context, which ``outside_inference`` returns outside inference mode."""


def outside_inference() -> AbstractContextManager[object]:
    """Return a context that leaves inference mode; free of cost outside the mode."""
    inside = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else _STAY


def allocate(tensor: Tensor) -> None:
    """Allocate memory for all elements of ``tensor``; the values are undefined."""
    # The caching allocator assigns the block to the current stream.
    nbytes, memory = tensor.nbytes, tensor.untyped_storage()
    if memory.nbytes() != nbytes:
        memory.resize_(nbytes)


def free(tensor: Tensor) -> None:
    """Free the memory of ``tensor``, which must not be read until ``allocate``."""
    try:
        tensor.untyped_storage().resize_(0)
    except RuntimeError as error:
        require_unresizable(tensor, error)


def require_unresizable(tensor: Tensor, error: RuntimeError) -> None:
    """Raise ``error``, unless the memory of ``tensor`` is not resizable any more."""
    # CPU memory that numpy views is not resizable; torch never frees such memory, so
    # the error of ``free`` is ignored.
    if tensor.untyped_storage().resizable():
        raise error


def leave(base: Tensor, views: Iterable[Tensor]) -> Tensor:
    """Give ``views`` of ``base`` other memory, with undefined values."""
    # Another object: the collective that may still run holds ``base`` and its memory.
    fresh = new_buffer(base.numel(), base.dtype, base.device)
    move(views, fresh, since=int(base.storage_offset()))
    return fresh


def move(views: Iterable[Tensor], home: Tensor, *, since: int) -> None:
    """Make ``views`` views of ``home``, at their places in their own buffer."""
    begin = home.storage_offset() - since
    # ``.data``: the objects stay, and with them hooks and version counters.
    for each in views:
        place = begin + each.storage_offset()
        each.data = home.as_strided(each.size(), each.stride(), place)


_moves = 0


def note_move() -> None:
    """Count that buffers which live across steps have come to other addresses."""
    global _moves
    _moves += 1


def moves() -> int:
    """Return how often ``note_move`` was called."""
    return _moves


def is_allocated(tensor: Tensor) -> bool:
    """Return whether ``tensor`` may be read; always True for an empty tensor."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def new_buffer(
    numel: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> Tensor:
    """Create an uninitialised flat buffer."""
    # Buffers live across calls. If an inference tensor were created here, training
    # could not write to the buffer.
    with outside_inference():
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)


def is_at(leaf: torch.Tensor, home: torch.Tensor) -> bool:
    """Return whether ``leaf`` is the same view of the same memory as ``home``."""
    # Strides too: a transposed view has the same address and, if square, the same
    # shape.
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) == (
        home.data_ptr(),
        home.dtype,
        home.shape,
        home.stride(),
    )


class FullMemory(Protocol):
    """Memory for full parameters that units use in turn (``features.arena``)."""

    def take(self, handle: Any) -> None:
        """Lay the full parameters into the memory, for an all-gather to fill."""
        ...

    def give_back(self) -> None:
        """End the use by the unit that took the memory last."""
        ...

    def leave(self) -> None:
        """Leave the memory to a collective that may still write there."""
        ...

    def is_vacant(self, handle: Any) -> bool:
        """Return whether no other unit has its full parameters there."""
        ...

    def make_way(self, context: Any, handle: Any) -> None:
        """Make room for ``handle``; raise PhaseError if another unit is in use."""
        ...

    def take_reductions(self, handle: Any) -> bool:
        """Lay the reduce buffers into the memory; False if gradients wait there."""
        ...

    def leave_reductions(self, handle: Any) -> None:
        """Leave the memory to a reduction that may still write there."""
        ...


# ---- pieces --------------------------------------------------------------------
#
# A piece holds the shards of several ranks, which are a slice of the full buffer:
#
#     full     | shard 0 | shard 1 | shard 2 | shard 3 |   2 pieces over 4 ranks
#     piece of ranks 0, 1          | of ranks 2, 3     |
#
# At rest, pieces are coarser than the shards that an optimizer updates: they are
# gathered from the shards, once after each change, and the full buffers from the
# pieces. Or else pieces are kept from a forward to its backward alone, and copied from
# the full buffers.
#
# On CUDA the gather stream alone allocates, writes, reads and frees pieces, in this
# order; no event is needed beside those that order the shards and the full buffers.


@dataclass(slots=True, eq=False)
class Pieces:
    """The pieces of a form, of each region with elements; without memory at first."""

    at_rest: bool
    """Whether the pieces stay from step to step, and not only until backward."""
    buffers: list[Tensor]
    starts: list[int]
    """Where in ``full`` the pieces begin."""
    inputs: list[Tensor]
    """What an all-gather of the pieces reads: the shard, or this rank's slice."""
    filled_at: tuple[int, ...] = ()
    """``shard_versions`` of the values in the pieces; empty, if these must not be
    used."""
    gathered_at: tuple[int, ...] = ()
    """``shard_versions`` at the last all-gather of the full buffers."""
    is_awaited: bool = False
    """Whether a backward awaits the pieces of a unit that is resharded."""

    def before_free(self, fulls: Sequence[Tensor]) -> None:
        """Copy the pieces from ``fulls``, which are about to be freed, or free them."""
        if self.at_rest:
            return
        self.filled_at = self.gathered_at if self.is_awaited else ()
        for buffer, full, start in zip(self.buffers, fulls, self.starts, strict=True):
            if self.is_awaited:
                allocate(buffer)
                copy_async(buffer, full[start : start + buffer.numel()])
            else:
                free(buffer)

    def leave(self, own: Iterable[Tensor]) -> None:
        """Give the pieces other memory, after an all-gather that raised."""
        self.filled_at = ()
        own = [*self.inputs, *own]
        for at, buffer in enumerate(self.buffers):
            here = buffer.untyped_storage()._cdata
            views = [x for x in own if x.untyped_storage()._cdata == here]
            self.buffers[at] = leave(buffer, views)
