"""Intervals cut into boxes: the case of the drawing, and what is refused.

``property_tests/test_box_laws.py`` holds the laws for any shape and interval.
"""

from __future__ import annotations

import pytest

from composable_fsdp.planning.boxes import Box, interval_boxes


def test_an_interval_that_begins_and_ends_inside_rows_has_three_boxes() -> None:
    """Each box's start counts from the interval's start, not the tensor's."""
    assert interval_boxes((4, 5), 3, 17) == (
        Box((0, 3), (1, 2), 0),
        Box((1, 0), (2, 5), 2),
        Box((3, 0), (1, 2), 12),
    )
    assert interval_boxes((), 0, 1) == (Box((), (), 0),)
    for start, stop in ((-1, 2), (3, 2), (0, 21)):
        with pytest.raises(ValueError, match=r"stop <= 20 for shape \(4, 5\), got sta"):
            interval_boxes((4, 5), start, stop)
