"""Taking a region apart while every rank keeps the elements that it has.

A parameter that is frozen or unfrozen belongs into another region, but an optimizer
holds state for the elements this rank has of it, and nobody can move that. So the
shards' boundaries inside parameters stay, and only what lies between them closes up::

    a (6), b (4), c (6) on two ranks    [ a a a a a a b b | b b c c c c c c ]
    a frozen: b and c                   [ b b . . . . . . | b b c c c c c c ]
              a                         [ a a a a a a | . . . . . . ]

A parameter that goes on to the next rank ends at the end of its slice and starts at the
start of the next. What remains are gaps: ranks whose share of the chosen parameters is
smaller than the largest. A part is never larger than the region it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.partition import SHARD_ALIGNMENT


def split_region(
    layout: RegionLayout, trainable: Sequence[bool]
) -> tuple[RegionLayout, ...]:
    """One region, or a trainable and a frozen one, by a flag per parameter.

    ``layout.interval`` of every parameter is on every rank what it was. If all flags
    are equal the layout is the same but for ``trainable``.
    """
    parts = []
    for flag in (True, False):
        chosen = [
            slot
            for slot, wanted in zip(layout.parameters, trainable, strict=True)
            if wanted is flag
        ]
        if len(chosen) == len(layout.parameters):
            return (replace(layout, trainable=flag),)
        parts.append(_compact(layout, chosen, trainable=flag))
    return tuple(parts)


def _compact(
    layout: RegionLayout, slots: list[ParameterSlot], *, trainable: bool
) -> RegionLayout:
    unit = max(SHARD_ALIGNMENT // layout.dtype.itemsize, 1)
    size = max(
        (_needed(layout, slots, r, unit) for r in range(layout.world_size)), default=0
    )
    size = _up(size, unit)
    return replace(
        layout,
        trainable=trainable,
        numel=sum(slot.numel for slot in slots),
        padded_numel=size * layout.world_size,
        shard_numel=size,
        parameters=tuple(_place(layout, slots, size, unit)),
    )


def _needed(
    layout: RegionLayout, slots: list[ParameterSlot], rank: int, unit: int
) -> int:
    """Elements that ``rank`` needs for its parts, each starting aligned."""
    total = 0
    for slot in slots:
        start, stop = layout.interval(slot, rank)
        if stop > start:
            total = _up(total, unit) + stop - start
    return total


def _place(
    layout: RegionLayout, slots: list[ParameterSlot], size: int, unit: int
) -> list[ParameterSlot]:
    placed = []
    end = 0
    for slot in slots:
        offset = end
        if slot.numel:
            first = slot.offset // layout.shard_numel
            part = min(layout.shard_numel * (first + 1) - slot.offset, slot.numel)
            if part < slot.numel:
                offset = (first + 1) * size - part
            else:
                offset = max(_up(end, unit), first * size)
        placed.append(replace(slot, offset=offset))
        end = offset + slot.numel
    return placed


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
