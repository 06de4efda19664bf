"""Pieces of full buffers that a rank keeps while the full parameters are freed.

A piece holds the shards of several ranks, which are a slice of the full buffer::

    full     | shard 0 | shard 1 | shard 2 | shard 3 |   2 pieces over 4 ranks
    piece of ranks 0, 1          | of ranks 2, 3     |

At rest, pieces are coarser than the shards that an optimizer updates: they are gathered
from the shards, once after each change, and the full buffers from the pieces. Or else
pieces are kept from a forward to its backward alone, and copied from the full buffers.

On CUDA the gather stream alone allocates, writes, reads and frees pieces, in this
order; no event is needed beside those that order the shards and the full buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from composable_fsdp.comm.device import copy_async
from composable_fsdp.flat import memory


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
    fills: tuple[tuple[Tensor, Tensor], ...]
    """Pairs (this rank's slice of the piece, shard) to copy before."""
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
                memory.allocate(buffer)
                copy_async(buffer, full[start : start + buffer.numel()])
            else:
                memory.free(buffer)

    def leave(self) -> None:
        """Give the pieces other memory, after an all-gather that raised."""
        self.filled_at = ()
        own = [*self.inputs, *(each for each, _ in self.fills)]
        for at, buffer in enumerate(self.buffers):
            here = buffer.untyped_storage()._cdata
            views = [x for x in own if x.untyped_storage()._cdata == here]
            self.buffers[at] = memory.leave(buffer, views)
