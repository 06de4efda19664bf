"""Laws of cutting an interval of a row-major tensor into boxes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import example, given

from composable_fsdp.planning.partition import Box, interval_boxes
from tests.support.strategies import shapes_with_interval

Case = tuple[tuple[int, ...], int, int]


def _numbers(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Return the flat indices that ``box`` holds in a tensor of ``shape``."""
    flat = torch.arange(prod(shape)).view(shape)
    where = zip(box.offsets, box.sizes, strict=True)
    return flat[tuple(slice(at, at + size) for at, size in where)].flatten()


@given(case=shapes_with_interval(max_dims=5))
@example(case=((), 0, 1))
@example(case=((3, 1, 4), 1, 11))
def test_boxes_hold_each_element_once_and_in_memory_order(case: Case) -> None:
    """Joined in order they are the interval, and each knows where in it it lies. There
    are as few as can be: at most two per dim less one."""
    shape, start, stop = case

    boxes = list(interval_boxes(shape, start, stop))

    parts = [_numbers(shape, box).tolist() for box in boxes]
    assert [number for part in parts for number in part] == list(range(start, stop))
    for box, part in zip(boxes, parts, strict=True):
        assert part == list(range(start + box.start, start + box.stop))
        assert box.numel == len(part) > 0
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
