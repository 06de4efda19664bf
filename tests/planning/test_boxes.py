"""Intervals cut into boxes, case by case."""

from __future__ import annotations

import pytest

from composable_fsdp.planning.boxes import Box, interval_boxes


def test_whole_tensor_is_one_box() -> None:
    """An interval that covers a tensor is that tensor."""
    boxes = interval_boxes((2, 3, 4), 0, 24)

    assert boxes == (Box((0, 0, 0), (2, 3, 4), 0),)


def test_interval_inside_a_row_is_one_box() -> None:
    """Elements of one row lie next to each other."""
    boxes = interval_boxes((4, 5), 6, 9)

    assert boxes == (Box((1, 1), (1, 3), 0),)


def test_interval_that_begins_and_ends_inside_rows_has_head_middle_and_tail() -> None:
    """Each box's start counts from the interval's start, not the tensor's."""
    boxes = interval_boxes((4, 5), 3, 17)

    assert boxes == (
        Box((0, 3), (1, 2), 0),
        Box((1, 0), (2, 5), 2),
        Box((3, 0), (1, 2), 12),
    )


def test_scalar_is_one_box_without_dims() -> None:
    """A 0-d tensor has one element, whose box has no offsets."""
    assert interval_boxes((), 0, 1) == (Box((), (), 0),)
    assert interval_boxes((), 0, 1)[0].numel == 1


@pytest.mark.parametrize(("shape", "at"), [((4, 5), 7), ((), 1), ((3, 0), 0)])
def test_empty_interval_has_no_boxes(shape: tuple[int, ...], at: int) -> None:
    """Nothing is cut from nothing, also where the tensor itself has no elements."""
    assert interval_boxes(shape, at, at) == ()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21)])
def test_interval_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    """The message gives the bounds, the shape and what came."""
    with pytest.raises(ValueError, match=r"stop <= 20 for shape \(4, 5\), got start="):
        interval_boxes((4, 5), start, stop)
