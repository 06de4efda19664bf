"""Splits a region in two while every rank keeps the elements that the rank holds.

A parameter whose ``requires_grad`` changes belongs into another region. Shard
boundaries inside parameters stay; a dot is padding, never more than before::

    a (6), b (4), c (6) on two ranks    [ a a a a a a b b | b b c c c c c c ]
    a frozen: b and c                   [ . . . . . . b b | b b c c c c c c ]
              a                         [ a a a a a a | . . . . . . ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.partition import SHARD_ALIGNMENT, round_up


def split_region(
    layout: RegionLayout, trainable: Sequence[bool]
) -> tuple[RegionLayout, ...]:
    """Return the parts of a region, trainable and frozen; ``trainable`` is per slot."""
    # An optimizer holds state for the elements that this rank has of a parameter, and
    # no collective moves that state. So every element stays on the same rank.
    parts = []
    for flag in (True, False):
        chosen = [
            slot
            for slot, wanted in zip(layout.parameters, trainable, strict=True)
            if wanted is flag
        ]
        if len(chosen) == len(layout.parameters):
            # All flags are equal: nothing moves, only ``trainable`` changes.
            return (replace(layout, trainable=flag),)
        parts.append(_compact(layout, chosen, trainable=flag))
    return tuple(parts)


def _compact(
    layout: RegionLayout, slots: list[ParameterSlot], *, trainable: bool
) -> RegionLayout:
    """Return a region of ``slots`` with the shard size of the rank that needs most."""
    # Elements per 16 bytes: every part starts aligned.
    unit = max(SHARD_ALIGNMENT // layout.dtype.itemsize, 1)
    # Shards have equal sizes, so the rank that needs most decides.
    size = _size(layout, slots, unit)
    while size > layout.shard_numel:
        # Parameters that were cast to a narrower dtype are aligned to fewer bytes. In a
        # larger shard one that covers whole ranks would be cut at other elements.
        unit //= 2
        size = _size(layout, slots, unit)
    return replace(
        layout,
        trainable=trainable,
        numel=sum(slot.numel for slot in slots),
        padded_numel=size * layout.world_size,
        shard_numel=size,
        parameters=tuple(_place(layout, slots, size, unit)),
    )


def _size(layout: RegionLayout, slots: list[ParameterSlot], unit: int) -> int:
    """Elements of a shard in which every rank finds room for its parts."""
    needed = (_needed(layout, slots, r, unit) for r in range(layout.world_size))
    # Blocks of a wire format are cut by no shard boundary; ``layout.shard_numel`` is a
    # multiple of them, so the new shard is not larger.
    grid = layout.wire.grid if layout.wire else 1
    return round_up(max(needed, default=0), lcm(unit, grid))


def _needed(
    layout: RegionLayout, slots: list[ParameterSlot], rank: int, unit: int
) -> int:
    """Return the elements that ``rank`` needs for its parts, each part aligned."""
    total = 0
    for slot in slots:
        start, stop = layout.interval(slot, rank)
        # Ranks without elements of the parameter need no space.
        if stop > start:
            total = round_up(total, unit) + stop - start
    return total


def _place(
    layout: RegionLayout, slots: list[ParameterSlot], size: int, unit: int
) -> list[ParameterSlot]:
    """Return ``slots`` with new offsets, for shards of ``size`` elements."""
    placed = []
    end = 0
    for slot in slots:
        offset = end
        # An empty parameter needs no position of its own.
        if slot.numel:
            # The first rank that holds the parameter, and the number of elements on
            # that rank.
            first = slot.offset // layout.shard_numel
            part = min(layout.shard_numel * (first + 1) - slot.offset, slot.numel)
            if part < slot.numel:
                # The parameter continues on the next rank. The first part ends with the
                # shard of rank ``first``, so that the rest begins at the start of the
                # next shard.
                offset = (first + 1) * size - part
            else:
                # The parameter lies on a single rank: place it behind the previous
                # part, and not before the start of this rank's shard.
                offset = max(round_up(end, unit), first * size)
        placed.append(replace(slot, offset=offset))
        end = offset + slot.numel
    return placed
