"""Slots of an arena: which units use the same memory for their full parameters.

::

    unit      root   block 0   block 1   block 2   block 3
    slot      0      1         2         1         2         (FULL_SHARD, BACKWARD_PRE)

Two units may share a slot if they are never full at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from composable_fsdp.config import Arena

ALIGNMENT = 256
"""Regions begin at multiples of this number of bytes, which suits every dtype and the
copy engines of GPUs."""


class Slot(NamedTuple):
    """Memory that units use in turn: its bytes, and the indices of the units."""

    nbytes: int
    units: tuple[int, ...]


def slot_bytes(regions: Iterable[int]) -> int:
    """Return the bytes of a slot for regions of the given bytes, one after another."""
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in regions)


def reduce_slots(
    sizes: Sequence[int], arenas: Sequence[Arena | None]
) -> tuple[tuple[Arena, int], ...]:
    """Return the bytes of the slot for reductions of each arena that keeps one."""
    found: dict[Arena, int] = {}
    # The largest: one reduction is in flight, and gradients of other units that wait
    # (``no_sync``) lie elsewhere.
    for nbytes, arena in zip(sizes, arenas, strict=True):
        if arena is not None and arena.reduce and nbytes:
            found[arena] = max(nbytes, found.get(arena, 0))
    return tuple(found.items())


def assign_slots(
    sizes: Sequence[int],
    arenas: Sequence[Arena | None],
    together: Collection[tuple[int, int]],
) -> tuple[Slot, ...]:
    """Give each unit with an arena the first slot that is free while it is full."""
    found: list[list[int]] = []
    # A slot is as large as its first unit. Sorting is stable: units of equal bytes stay
    # in forward order.
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        arena = arenas[index]
        if arena is None or not sizes[index]:
            continue
        for units in found if arena.shared else ():
            if arenas[units[0]] == arena and not any(
                (index, other) in together for other in units
            ):
                units.append(index)
                break
        else:
            found.append([index])
    return tuple(Slot(sizes[units[0]], tuple(units)) for units in found)
