"""Layouts: the drawing in the module, and what is no interval."""

from __future__ import annotations

import pytest
import torch

from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.planning.layout import ParameterSpec, RegionLayout, row_block
from composable_fsdp.planning.partition import plan_regions


def owned(region: RegionLayout, rank: int) -> dict[str, tuple[int, int]]:
    """What a rank holds, by name."""
    spans = {slot.fqn: region.interval(slot, rank) for slot in region.parameters}
    return {name: span for name, span in spans.items() if span[0] < span[1]}


def test_the_drawing_in_the_module_is_what_is_planned() -> None:
    """Four ranks hold rows 0-1, rows 2-3, row 4 with half the bias, and the rest."""
    specs = [
        ParameterSpec((name,), shape, torch.float32, True, row_block(shape))
        for name, shape in (("weight", (5, 4)), ("bias", (8,)))
    ]
    (region,) = plan_regions(specs, world_size=4)

    assert (region.numel, region.padded_numel, region.shard_numel) == (28, 32, 8)
    assert [owned(region, rank) for rank in range(4)] == [
        {"weight": (0, 8)},
        {"weight": (8, 16)},
        {"weight": (16, 20), "bias": (0, 4)},
        {"bias": (4, 8)},
    ]
    assert [region.cuts.sizes[i] for i in region.cuts.gaps] == [4]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 21)])
def test_an_interval_outside_of_the_elements_is_refused(start: int, stop: int) -> None:
    """With the number of elements, the shape and what came."""
    with pytest.raises(ValueError, match=r"stop <= 20 for shape \(4, 5\), got start="):
        interval_boxes((4, 5), start, stop)
