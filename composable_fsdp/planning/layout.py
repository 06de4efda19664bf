"""The layout of a unit's parameters in flat buffers, as integers and names only.

A region is a contiguous flat buffer of parameters of a single dtype, all trainable or
all frozen. Equal shards cut it, never inside a block, at multiples of 16 bytes
(docs/development/tour.md has a drawing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from composable_fsdp.comm.wire_format import Matrix, WireFormat, WireLayout


class Whole(NamedTuple):
    """Where a rank's rectangle lies in a parameter that other ranks hold parts of."""

    shape: tuple[int, ...]
    """The shape of the global parameter, as files and the plain model have it."""
    offset: tuple[int, ...]
    axes: tuple[tuple[str, int, int | None], ...]
    """Per dim of the TP mesh its name, its size and the dim it cuts, or None."""

    def __str__(self) -> str:
        held = [
            f"{name or 'mesh'} {size} {'replicated' if dim is None else f'dim {dim}'}"
            for name, size, dim in self.axes
        ]
        return f"part of {self.shape} at {self.offset}: {', '.join(held)}"


class ParameterSpec(NamedTuple):
    """The facts about a parameter that a layout depends on."""

    fqns: tuple[str, ...]
    """Names from the unit's module; several if it is tied inside the unit."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    block: int
    """Run of elements that no shard boundary may cut."""
    whole: Whole | None = None
    """Of a DTensor, the place of this rank's rectangle, whose shape is ``shape``."""
    wire: WireFormat | None = None
    """Parameters of different formats share no region."""
    uncut: bool = False
    """Whether it lies on a single rank, if it is no larger than a rank's share."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """The interval ``[offset, offset + numel)`` of a parameter in its region."""

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    block: int
    offset: int
    index: int
    """Position in the unit's list of parameters, whose names need not be unique."""
    whole: Whole | None = None

    @property
    def fqn(self) -> str:
        """The first owner's name of the parameter, from the unit's module."""
        return self.fqns[0]


class Cuts(NamedTuple):
    """Sizes of consecutive pieces of a buffer, as for ``torch.split``."""

    sizes: tuple[int, ...]
    parameters: tuple[tuple[int, tuple[int, ...] | None], ...]
    """Per parameter the index of its piece, and its shape; None for a vector."""
    gaps: tuple[int, ...]
    """Indices of the pieces that are padding."""


class ShardCuts(NamedTuple):
    """The parts of the parameters in the shard of a rank."""

    parts: tuple[tuple[int, int, int], ...]
    """Per parameter (start, stop, offset): where elements ``[start, stop)`` lie."""
    cuts: Cuts
    absent: tuple[int, ...]
    """Indices of parameters with elements on other ranks only."""
    places: tuple[tuple[tuple[int, ...], tuple[int, ...], int] | None, ...]
    """Per parameter, shape, strides and offset of its part; None of an absent one."""


@dataclass(frozen=True)
class RegionLayout:
    """The layout of a flat buffer of ``padded_numel == shard_numel * world_size``."""

    dtype: torch.dtype
    trainable: bool
    block: int
    """Least common multiple of the parameters' blocks and the alignment."""
    world_size: int
    numel: int
    padded_numel: int
    shard_numel: int
    parameters: tuple[ParameterSlot, ...]
    """In memory order."""
    wire: WireFormat | None = None
    """The format in which the region is gathered; None: in the compute dtype."""

    @cached_property
    def wire_layout(self) -> WireLayout:
        """The region as a wire format sees it."""
        return WireLayout(
            self.world_size,
            self.shard_numel,
            tuple(
                [
                    Matrix(s.offset, s.shape[0], row_block(s.shape))
                    for s in self.parameters
                ]
            ),
        )

    @cached_property
    def wire_nbytes(self) -> int:
        """Bytes of the encoded values of all ranks; 0 without a wire format."""
        return self.world_size * self.wire.nbytes(self.wire_layout) if self.wire else 0

    def interval(self, slot: ParameterSlot, rank: int) -> tuple[int, int]:
        """Return the elements ``(start, stop)`` of the parameter on ``rank``."""
        # The shard's first element, counted from the parameter's first.
        low = rank * self.shard_numel - slot.offset
        # Clamp: the shard may lie entirely before or behind the parameter.
        start = min(max(low, 0), slot.numel)
        return start, min(max(low + self.shard_numel, 0), slot.numel)

    def holders(self, slot: ParameterSlot) -> range:
        """Return the ranks that hold elements of the parameter; all ranks if empty."""
        if not slot.numel:
            return range(self.world_size)
        # A parameter is contiguous, so the ranks that hold elements are consecutive.
        last = (slot.offset + slot.numel - 1) // self.shard_numel
        return range(slot.offset // self.shard_numel, last + 1)

    def shard_offset(self, slot: ParameterSlot, rank: int) -> int:
        """Return the offset of the parameter's part in ``rank``'s shard; 0 if empty."""
        start, stop = self.interval(slot, rank)
        return slot.offset + start - rank * self.shard_numel if stop > start else 0

    @cached_property
    def cuts(self) -> Cuts:
        """The cuts of the buffer into parameters and padding, for a single split."""
        return _cut(
            [(s.offset, s.numel, s.shape) for s in self.parameters], self.padded_numel
        )

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The index of each parameter in its unit, in memory order."""
        return tuple([slot.index for slot in self.parameters])

    @cached_property
    def is_plain(self) -> bool:
        """Whether no parameter is cut by tensor parallelism, so none has a form."""
        return all(slot.whole is None for slot in self.parameters)

    def shard_cuts(self, rank: int, *, rows: bool) -> ShardCuts:
        """Return the cuts of ``rank``'s shard into parts of parameters and padding."""
        # Units of equal shapes share a layout, so the cuts are computed once for all.
        known = self._shard_cuts.get((rank, rows))
        if known is None:
            slots = self.parameters
            parts = [
                (*self.interval(s, rank), self.shard_offset(s, rank)) for s in slots
            ]
            held = [
                (
                    at,
                    stop - start,
                    sharded_shape(
                        s.shape, stop - start, rows=rows, world_size=self.world_size
                    ),
                )
                for s, (start, stop, at) in zip(slots, parts, strict=True)
            ]
            # An empty parameter is absent nowhere: no rank holds an element.
            absent = tuple(
                i
                for i, (start, stop, _) in enumerate(parts)
                if slots[i].numel and start == stop
            )
            places = tuple(
                None if i in absent else (shape, row_strides(shape), at)
                for i, (at, _, shape) in enumerate(held)
            )
            cuts = _cut(held, self.shard_numel)
            known = ShardCuts(tuple(parts), cuts, absent, places)
            self._shard_cuts[rank, rows] = known
        return known

    @cached_property
    def _shard_cuts(self) -> dict[tuple[int, bool], ShardCuts]:
        """Cache of ``shard_cuts`` by (rank, rows)."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, padding included."""
        return self.padded_numel * self.dtype.itemsize


def _cut(held: Sequence[tuple[int, int, tuple[int, ...]]], numel: int) -> Cuts:
    """Cut ``numel`` elements into the parts ``held`` and the padding between."""
    sizes: list[int] = []
    parameters: list[tuple[int, tuple[int, ...] | None]] = []
    gaps: list[int] = []
    end = 0
    for offset, size, shape in held:
        # ``>``, not ``!=``: an empty interval may have offset 0 and needs no gap.
        if offset > end:
            gaps.append(len(sizes))
            sizes.append(offset - end)
            end = offset
        parameters.append((len(sizes), shape if len(shape) != 1 else None))
        sizes.append(size)
        end += size
    if numel > end:
        gaps.append(len(sizes))
        sizes.append(numel - end)
    return Cuts(tuple(sizes), tuple(parameters), tuple(gaps))


def row_block(shape: Sequence[int]) -> int:
    """Return the elements per row (index of dim 0) of a parameter; 1 below two dims."""
    # At least 1: a trailing dim of size 0 has empty rows.
    return max(prod(shape[1:]), 1) if len(shape) >= 2 else 1


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``, in elements."""
    return tuple([max(prod(shape[dim + 1 :]), 1) for dim in range(len(shape))])


def sharded_shape(
    shape: Sequence[int], numel: int, *, rows: bool, world_size: int
) -> tuple[int, ...]:
    """Return the shape of a sharded parameter with ``numel`` elements.

    >>> sharded_shape((5, 4), 8, rows=True, world_size=2)
    (2, 4)
    """
    if world_size == 1:
        return tuple(shape)
    if not rows or len(shape) < 2:
        return (numel,)
    trailing = tuple(shape[1:])
    width = prod(trailing)
    # With a trailing dim of size 0 there are no elements, so every rank has 0 rows.
    return (numel // width if width else 0, *trailing)
