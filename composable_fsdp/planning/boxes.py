"""Cuts an interval of a row-major tensor into rectangular boxes.

A shard is an interval of the flattened parameter; checkpoint formats store rectangles::

    shape (4, 5), interval [3, 17)
    row 0  . . . A A        A  offsets (0, 3)  sizes (1, 2)  start  0
    row 1  B B B B B        B  offsets (1, 0)  sizes (2, 5)  start  2
    row 2  B B B B B        C  offsets (3, 0)  sizes (1, 2)  start 12
    row 3  C C . . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from composable_fsdp.planning.layout import row_strides


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor whose elements are adjacent in memory.

    Args:
        offsets: index of the first element, per dim.
        sizes: number of indices, per dim.
        start: position of the box's first element in the interval, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return prod(self.sizes)

    @property
    def stop(self) -> int:
        """Position after the box's last element in the interval, in elements."""
        return self.start + self.numel


def moved(boxes: Sequence[Box], by: Sequence[int]) -> tuple[Box, ...]:
    """Return the boxes of a rectangle in the tensor in which it lies at ``by``.

    >>> [box.offsets for box in moved(interval_boxes((2, 4), 0, 8), (6, 0))]
    [(6, 0)]
    """
    return tuple(
        replace(box, offsets=tuple(a + b for a, b in zip(box.offsets, by, strict=True)))
        for box in boxes
    )


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut elements ``[start, stop)`` of a row-major tensor of ``shape`` into boxes.

    Raises: ValueError, if the interval is not inside the tensor.

    >>> [(box.offsets, box.sizes) for box in interval_boxes((4, 5), 3, 17)]
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(
            f"interval_boxes expects 0 <= start <= stop <= {prod(shape)} for shape "
            f"{shape}, got start={start}, stop={stop}."
        )
    strides = row_strides(shape)
    boxes: list[Box] = []
    position = start
    # Seen from its start, an interval first completes the rows in which it begins (with
    # growing strides), then takes whole slices of dim 0, then breaks off inside a row
    # (with shrinking strides). Each stride is used at most once upwards and once
    # downwards, so ``n`` dims give at most ``2 * n - 1`` boxes.
    while position < stop:
        sizes = _largest_box(shape, strides, position, stop)
        offsets = tuple(
            position // stride % size
            for size, stride in zip(shape, strides, strict=True)
        )
        boxes.append(Box(offsets, sizes, position - start))
        position += prod(sizes)
    return tuple(boxes)


def _largest_box(
    shape: tuple[int, ...], strides: tuple[int, ...], position: int, stop: int
) -> tuple[int, ...]:
    """Return the sizes of the largest box at ``position`` that ends by ``stop``."""
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        # A box along this dim must start where all later dims are at index 0; a box
        # that starts elsewhere would not be a single rectangle.
        if position % stride:
            continue
        left_in_dim = size - position // stride % size
        count = min((stop - position) // stride, left_in_dim)
        if count:
            return (1,) * dim + (count,) + shape[dim + 1 :]
    return ()  # a 0-d tensor has a single element, which is the box
