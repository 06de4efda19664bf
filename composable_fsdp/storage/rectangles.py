"""Rectangles of a tensor: the elements that a rank of tensor parallelism holds.

A rectangle is flattened for itself, and a file has the elements of the whole tensor in
row-major order. Elements that are adjacent in the rectangle are adjacent in the whole
tensor within a *run*::

    whole (3, 6), rectangle at (0, 2) of shape (3, 2)

    row 0  .  .  0  1  .  .        elements [0, 2) are [ 2,  4) of the whole
    row 1  .  .  2  3  .  .        elements [2, 4) are [ 8, 10)
    row 2  .  .  4  5  .  .        elements [4, 6) are [14, 16)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from composable_fsdp.planning.layout import Whole


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The indices ``[offset[d], offset[d] + shape[d])`` of each dim of a tensor."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    adjacent: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Number of elements that are adjacent in the whole tensor as well."""
        # Dims after the last one that is cut are whole.
        for dim in reversed(range(len(self.shape))):
            if self.shape[dim] != self.whole[dim]:
                return prod(self.shape[dim:])
        return self.numel

    def position(self, element: int) -> int:
        """Return where an element of the flattened rectangle is in the whole tensor."""
        found, stride = 0, 1
        # From the last dim, whose indices are adjacent.
        for at, size, count in zip(
            reversed(self.offset),
            reversed(self.whole),
            reversed(self.shape),
            strict=True,
        ):
            element, index = divmod(element, count)
            found += (at + index) * stride
            stride *= size
        return found

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield elements ``[start, stop)`` as intervals of the whole tensor."""
        # The first run may begin inside of a row, and the last may end there.
        width = self.width
        while start < stop:
            count = min(stop - start, width - start % width)
            at = self.position(start)
            yield at, at + count
            start += count

    def moved(self, start: int, stop: int) -> tuple[Rectangle | None, int, int]:
        """Return the interval in the whole tensor, with None, if that is an interval.

        Otherwise the rectangle and the interval as they are.
        """
        if not self.adjacent:
            return self, start, stop
        # A rank without rows has an offset behind the end, and no element.
        first = self.position(0) if start < stop else 0
        return None, first + start, first + stop


def rectangle_of(place: Whole, shape: Sequence[int]) -> Rectangle:
    """Return the rectangle of a DTensor's part on this rank."""
    cut = sorted({dim for _, size, dim in place.axes if dim is not None and size > 1})
    # Of the placement and not of this rank's part: ranks must store a parameter alike,
    # and the part of a rank may be a single row.
    adjacent = not cut or (len(cut) == 1 and prod(place.shape[: cut[0]]) == 1)
    return Rectangle(place.shape, place.offset, tuple(shape), adjacent)
