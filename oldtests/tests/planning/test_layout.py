"""Layouts: the drawing in the module, known models, and the odd shapes."""

from __future__ import annotations

import pytest
import torch

from composable_fsdp.planning.layout import (
    ParameterSpec,
    RegionLayout,
    row_block,
    sharded_shape,
)
from composable_fsdp.planning.partition import plan_regions

Shapes = dict[str, tuple[int, ...]]
WIDE = 10**15
"""A launch so dear that all block classes share one region."""

LLAMA_3_8B_BLOCK: Shapes = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
    "norm_1": (4096,),
    "norm_2": (4096,),
}


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


def padding(regions: tuple[RegionLayout, ...]) -> float:
    """Padding as a share of the parameters."""
    return sum(r.padded_numel for r in regions) / sum(r.numel for r in regions) - 1


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


@pytest.mark.req("U-14")
@pytest.mark.parametrize(
    ("world_size", "one_grid"), [(64, 0.0012), (256, 0.0096), (1024, 0.0769)]
)
def test_a_llama_block_keeps_whole_rows_without_padding(
    world_size: int, one_grid: float
) -> None:
    """Regions for each width of rows need none, where one grid pays up to 8 %."""
    specs = specs_of(LLAMA_3_8B_BLOCK, torch.bfloat16)

    regions = plan_regions(specs, world_size=world_size)
    merged = plan_regions(specs, world_size=world_size, launch_bytes=WIDE)

    assert [region.block for region in regions] == [4096, 14336, 8]
    assert padding(regions) == 0
    assert len(merged) == 1
    assert padding(merged) == pytest.approx(one_grid, abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "numel", "rows", "world_size", "expected"),
    [
        ((1024, 4096), 8 * 4096, True, 128, (8, 4096)),
        ((6, 2, 3), 12, True, 2, (2, 2, 3)),
        ((6, 2, 3), 0, True, 2, (0, 2, 3)),
        ((5, 0), 0, True, 2, (0, 0)),
        ((5, 4), 10, False, 2, (10,)),
        ((7,), 3, True, 2, (3,)),
        ((), 1, True, 2, (1,)),
        ((), 0, True, 2, (0,)),
        ((), 1, True, 1, ()),
        ((5, 4), 20, False, 1, (5, 4)),
    ],
)
@pytest.mark.req("B-25")
def test_a_sharded_matrix_keeps_its_trailing_dims(
    shape: tuple[int, ...],
    numel: int,
    rows: bool,
    world_size: int,
    expected: tuple[int, ...],
) -> None:
    """Rows keep the dims after the first, elements are flat; alone, all dims stay."""
    assert sharded_shape(shape, numel, rows=rows, world_size=world_size) == expected
