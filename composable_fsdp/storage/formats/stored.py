"""A tensor in a checkpoint, as the readers of formats return tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from composable_fsdp.storage.source import TensorInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: dtype, shape, and a function that reads elements.

    ``read(start, stop)`` returns elements of the flattened tensor. ``storage`` is equal
    for all names of a tied tensor; None if the format cannot tell.
    """

    info: TensorInfo
    read: Callable[[int, int], Tensor]
    storage: Hashable = None
