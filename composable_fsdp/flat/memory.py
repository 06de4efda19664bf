"""Allocating and freeing the storage of a tensor while views of the tensor stay valid.

Reading a view of an empty storage raises or crashes, so callers hide the views first.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm.device import Waitable
from composable_fsdp.comm.groups import GroupRef

_STAY = nullcontext()


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
    # Training could not write to an inference tensor.
    with outside_inference():
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)


class GatherSource:
    """What an all-gather reads in place of the shards (``flat.gather_sources``)."""

    __slots__ = ()
    at_rest = False
    """Whether ``kept`` has values from step to step."""
    kept: Any = ()
    """Buffers (a list) that may have memory while the full buffers have none."""

    def fill(self, context: Any, handle: Any) -> tuple[list[Tensor], GroupRef | None]:
        """Return the inputs of the all-gather, filled, and the group it is over."""
        raise NotImplementedError

    def landing(self, handle: Any, work: Waitable | None) -> Waitable | None:
        """Return what to wait for instead of ``work``, the all-gather."""
        return work

    def leave(self, handle: Any) -> None:
        """Give other memory to what an all-gather that has raised may still use."""

    def before_free(self, handle: Any) -> None:
        """Keep what is to stay of the full buffers, which are about to be freed."""

    def drop(self) -> None:
        """Free ``kept``, whose values must not be used any more."""
