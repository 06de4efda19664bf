"""Works over several calls of a backend, which are waited for as a single call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Works:
    """A ``Work`` over several calls."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, limit: timedelta) -> None:
        """Wait for the calls, at most ``limit`` for each; RuntimeError after it."""
        for work in self._works:
            work.wait(limit)

    def is_completed(self) -> bool:
        """Return whether the next ``wait`` returns or raises at once."""
        return all(work.is_completed() for work in self._works)


def call_each(
    start: Callable[..., dist.Work], buffers: Sequence[tuple[object, ...]], options: Any
) -> Works | dist.Work:
    """Return the work, or works, of ``start(*buffers, options)`` for each buffers."""
    works = [start(*each, options) for each in buffers]
    return works[0] if len(works) == 1 else Works(works)


class ReducedSlices(Works):
    """The reduce-scatter of gloo: all-reduces, of which every rank keeps its slice."""

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
        """Wait for the all-reduces, at most ``limit`` for each, and copy the slices."""
        super().wait(limit)
        torch._foreach_copy_(self._outputs, self._slices)


def all_reduce_slices(
    start: Callable[..., dist.Work],
    rank: int,
    shard: Any,
    full: Any,
    op: Any,
    overwrite: bool,
) -> ReducedSlices:
    """Reduce-scatter by an all-reduce of each full buffer."""
    # torch's reduce-scatter over gloo copies the input, all-reduces the copy, and
    # returns a ``Work`` that ignores the limit of a wait and never completes.
    options = dist.AllreduceOptions()
    options.reduceOp = op
    if isinstance(full, Tensor):
        shard, full = [shard], [full]
    if not overwrite:
        full = [tensor.clone() for tensor in full]
    return ReducedSlices(
        # A call per buffer: coalesced buffers would be added in another order.
        [start([tensor], options) for tensor in full],
        [
            tensor.narrow(0, rank * len(part), len(part))
            for tensor, part in zip(full, shard, strict=True)
        ],
        list(shard),
    )
