"""Works over several calls of a backend, which are waited for as a single call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class Works:
    """A ``Work`` over several calls."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, limit: timedelta) -> None:
        """Wait for the calls, at most ``limit`` for each.

        Raises: RuntimeError, after ``limit`` or if the backend raises.
        """
        for work in self._works:
            work.wait(limit)

    def is_completed(self) -> bool:
        """Return whether the next ``wait`` returns or raises at once."""
        return all(work.is_completed() for work in self._works)


def one_call_per_buffer(
    start: Callable[..., dist.Work],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    options: object,
) -> Works:
    """Return the works of ``start(output, input, options)`` for each pair."""
    pairs = zip(outputs, inputs, strict=True)
    return Works([start(output, each, options) for output, each in pairs])


class ReducedSlices(Works):
    """The reduce-scatter of gloo: all-reduces, of which every rank keeps its slice.

    Unlike torch's reduce-scatter over gloo, a wait ends at its limit, and a completed
    reduction says so.
    """

    __slots__ = ("_outputs", "_slices")

    def __init__(
        self,
        works: Sequence[dist.Work],
        slices: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        super().__init__(works)
        self._slices, self._outputs = slices, outputs

    def wait(self, limit: timedelta) -> None:
        """Wait for the all-reduces, at most ``limit`` for each, and copy the slices.

        Raises: RuntimeError, after ``limit`` or if the backend raises.
        """
        super().wait(limit)
        torch._foreach_copy_(self._outputs, self._slices)
