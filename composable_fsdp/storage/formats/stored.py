"""A tensor that lies in a checkpoint, as the readers of formats pass it on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from composable_fsdp.storage.source import TensorInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: what it is, and how its elements are read.

    ``storage`` is equal for names of one tensor; None where the format cannot tell.
    """

    info: TensorInfo
    read: Callable[[int, int], Tensor]
    storage: Hashable = None
