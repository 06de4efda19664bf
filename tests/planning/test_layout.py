"""Layouts: the drawing in the module, known models, and the odd shapes."""

from __future__ import annotations

import torch

from composable_fsdp.planning.layout import (
    ParameterSpec,
    RegionLayout,
    row_block,
)
from composable_fsdp.planning.partition import plan_regions

Shapes = dict[str, tuple[int, ...]]


def specs_of(
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    *,
    frozen: frozenset[str] = frozenset(),
) -> list[ParameterSpec]:
    return [
        ParameterSpec((name,), shape, dtype, name not in frozen, row_block(shape))
        for name, shape in shapes.items()
    ]


def owned(region: RegionLayout, rank: int) -> dict[str, tuple[int, int]]:
    """What a rank holds, by name."""
    spans = {slot.fqn: region.interval(slot, rank) for slot in region.parameters}
    return {name: span for name, span in spans.items() if span[0] < span[1]}


def test_the_drawing_in_the_module_is_what_is_planned() -> None:
    """Four ranks hold rows 0-1, rows 2-3, row 4 with half the bias, and the rest."""
    (region,) = plan_regions(specs_of({"weight": (5, 4), "bias": (8,)}), world_size=4)

    assert (region.numel, region.padded_numel, region.shard_numel) == (28, 32, 8)
    assert [owned(region, rank) for rank in range(4)] == [
        {"weight": (0, 8)},
        {"weight": (8, 16)},
        {"weight": (16, 20), "bias": (0, 4)},
        {"bias": (4, 8)},
    ]
    assert [region.cuts.sizes[i] for i in region.cuts.gaps] == [4]
