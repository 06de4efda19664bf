"""``WireFormat``: what a user derives to encode the shards that an all-gather sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """A parameter in the flat buffer of a region; rows are indices of dim 0."""

    offset: int
    """The first element in the flat buffer."""
    rows: int
    width: int


class WireLayout(NamedTuple):
    """The flat buffer that a wire format encodes; the same on every rank."""

    world_size: int
    shard_numel: int
    matrices: tuple[Matrix, ...]
    """The parameters in memory order."""

    def parts(self, rank: int) -> list[tuple[int, int, int]]:
        """Return (matrix, first row, last row + 1) of each matrix in a rank's shard."""
        # Matrices lie in memory order, so the parts are in the order of the shard.
        low = rank * self.shard_numel
        found = []
        for index, (offset, rows, width) in enumerate(self.matrices):
            # Shard boundaries never cut a row (``Block.ROW``).
            first = min(max(low - offset, 0) // width, rows)
            last = min(max(low + self.shard_numel - offset, 0) // width, rows)
            if last > first:
                found.append((index, first, last))
        return found


class WireFormat(ABC):
    """Encodes shards before an all-gather, and decodes the bytes of all ranks.

    Derive a frozen dataclass, so that equal formats compare equal, and pass an instance
    as ``fully_shard(.., wire=..)``. All ranks must pass equal formats. The methods run
    on the stream of the all-gather.
    """

    grid: int = 1
    """A shard's number of elements is a multiple of this number."""
    needs_rows: bool = False
    """Whether no shard boundary may cut a row (``block=Block.ROW``)."""

    def __repr__(self) -> str:
        # Ranks compare the texts of formats: the address of the object would differ.
        told = (f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({', '.join(told)})"

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether a parameter of this shape and dtype is encoded.

        Other parameters of the unit are gathered as they are. Here: floating point
        parameters of two and more dims with elements.
        """
        return dtype.is_floating_point and len(shape) >= 2 and 0 not in shape

    @abstractmethod
    def nbytes(self, layout: WireLayout) -> int:
        """Return the bytes of a rank's slice of the wire, a multiple of 16."""

    def scratch_nbytes(self, layout: WireLayout, dtype: torch.dtype) -> int:
        """Return the bytes of the temporary tensors of ``encode``, for the plan.

        Here: twice the shard in float32. ``dtype`` is the dtype of the shard.
        """
        return 8 * layout.shard_numel

    @abstractmethod
    def encode(self, shard: Tensor, out: Tensor, layout: WireLayout, rank: int) -> None:
        """Write a shard into this rank's slice of the wire.

        Args:
            shard: this rank's elements ``(shard_numel,)``.
            out: the slice ``(nbytes,)`` in uint8; every byte must be written.
            layout: the flat buffer.
            rank: this rank's index in the shard group.
        """

    @abstractmethod
    def decode(self, wire: Tensor, full: Tensor, layout: WireLayout) -> None:
        """Write the elements of all ranks into ``full``.

        Args:
            wire: the slices of all ranks ``(world_size * nbytes,)`` in uint8, in rank
                order.
            full: the output ``(padded_numel,)`` in the compute dtype.
            layout: the flat buffer.
        """
