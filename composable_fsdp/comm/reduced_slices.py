"""The reduce-scatter of gloo: all-reduces, of which every rank keeps its slice."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class ReducedSlices:
    """A ``Work`` over several all-reduces, which copies slices of the sums at the end.

    Unlike the reduce-scatter of gloo, a wait ends at its limit, and a completed
    reduction says so.
    """

    __slots__ = ("_outputs", "_slices", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        slices: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        self._works, self._slices, self._outputs = works, slices, outputs

    def wait(self, limit: timedelta) -> None:
        """Wait for the all-reduces, at most ``limit`` for each, and copy the slices.

        Raises: RuntimeError, after ``limit`` or if the backend raises.
        """
        for work in self._works:
            work.wait(limit)
        torch._foreach_copy_(self._outputs, self._slices)

    def is_completed(self) -> bool:
        """Return whether the next ``wait`` returns or raises at once."""
        return all(work.is_completed() for work in self._works)
