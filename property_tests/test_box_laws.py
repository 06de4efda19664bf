"""Laws of cutting an interval of a row-major tensor into boxes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import example, given

from composable_fsdp.planning.boxes import Box, interval_boxes
from tests.support.strategies import shapes_with_interval

Case = tuple[tuple[int, ...], int, int]


def _numbers(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Return the flat indices that ``box`` holds in a tensor of ``shape``."""
    flat = torch.arange(prod(shape)).view(shape)
    where = zip(box.offsets, box.sizes, strict=True)
    return flat[tuple(slice(at, at + size) for at, size in where)].flatten()


@given(case=shapes_with_interval())
@example(case=((), 0, 1))
@example(case=((3, 1, 4), 1, 11))
def test_boxes_hold_each_element_once_and_in_memory_order(case: Case) -> None:
    """Joined in order, the boxes are the interval: nothing lost, doubled or moved."""
    shape, start, stop = case

    parts = [
        _numbers(shape, box).tolist() for box in interval_boxes(shape, start, stop)
    ]

    assert [number for part in parts for number in part] == list(range(start, stop))


@given(case=shapes_with_interval())
def test_start_says_where_a_box_lies_in_its_interval(case: Case) -> None:
    """A box's numel elements from ``start`` on are those of its rectangle."""
    shape, start, stop = case

    for box in interval_boxes(shape, start, stop):
        expected = range(start + box.start, start + box.stop)

        assert _numbers(shape, box).tolist() == list(expected)
        assert box.numel == len(expected)


@given(case=shapes_with_interval(max_dims=5))
def test_there_are_at_most_two_boxes_per_dim_less_one(case: Case) -> None:
    """The bound is the known one, and no box is empty."""
    shape, start, stop = case

    boxes = interval_boxes(shape, start, stop)

    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel > 0 for box in boxes)
