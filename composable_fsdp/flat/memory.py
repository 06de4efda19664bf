"""Giving a tensor its memory and taking it away, while views of it stay valid.

A view keeps its offset and strides when the storage below it is resized, so views are
made once. Reading one while the storage is empty is an error at best and a crash at
worst: whoever frees must first have taken the views out of reach.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_STAY = nullcontext()


def outside_inference() -> AbstractContextManager[object]:
    """Leave inference mode for a while; where there is none this takes no time."""
    inside = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else _STAY


def allocate(tensor: Tensor) -> None:
    """Give ``tensor`` memory for all its elements; their values are undefined.

    The block belongs to the current stream. Nothing is sent.
    """
    nbytes, memory = tensor.nbytes, tensor.untyped_storage()
    if memory.nbytes() != nbytes:
        memory.resize_(nbytes)


def free(tensor: Tensor) -> None:
    """Give the memory back; the tensor keeps its shape and must not be read.

    Memory that numpy was shown (on a CPU) stays: torch never resizes it again.
    """
    memory = tensor.untyped_storage()
    try:
        memory.resize_(0)
    except RuntimeError:
        if memory.resizable():
            raise


def is_allocated(tensor: Tensor) -> bool:
    """Whether ``tensor`` may be read. A tensor without elements always may."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def new_buffer(
    numel: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> Tensor:
    """Return an uninitialised flat buffer ``(numel,)``; ``pinned`` is for host memory.

    Made outside inference mode whatever the caller's mode is: it is kept across calls,
    and an inference tensor could never be written to in training.
    """
    with outside_inference():
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
