"""A region's buffers and leaves, built for each rank in turn in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp.flat import memory
from composable_fsdp.flat.build_region import build_region, full_views
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.layout import ParameterSpec, row_block
from composable_fsdp.planning.options import Dtypes
from composable_fsdp.planning.partition import plan_regions

SHAPES = ((5, 4), (8,), (), (3, 2, 2), (0, 3))


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, *, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Parameters that count up from one, so that every element is another."""
    made, start = [], 1
    for shape in shapes:
        numel = torch.Size(shape).numel()
        values = torch.arange(start, start + numel, dtype=dtype).reshape(shape)
        made.append(nn.Parameter(values))
        start += numel
    return made


def region_of(
    params: Sequence[nn.Parameter],
    *,
    world_size: int,
    rank: int = 0,
    rows: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> FlatParameter:
    """Build the one region of ``params`` for ``rank``; they are sharded afterwards."""
    specs = [
        ParameterSpec(
            (str(i),),
            tuple(p.shape),
            p.dtype,
            p.requires_grad,
            row_block(p.shape) if rows else 1,
        )
        for i, p in enumerate(params)
    ]
    (layout,) = plan_regions(specs, world_size=world_size, launch_bytes=10**15)
    return build_region(
        layout,
        [params[int(slot.fqn)] for slot in layout.parameters],
        rank=rank,
        rows=rows,
        device=params[0].device,
        dtypes=Dtypes(compute_dtype or layout.dtype, layout.dtype, layout.dtype),
    )


def gather(region: FlatParameter, shards: Sequence[Tensor]) -> None:
    """Do what the all-gather does: fill ``full`` with the ranks' shards."""
    memory.allocate(region.full.buffer)
    with torch.no_grad():
        region.full.buffer.copy_(torch.cat(list(shards)))


@pytest.mark.req("X-28", "S2-11")
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 40])
def test_shards_of_all_ranks_rebuild_every_parameter(
    world_size: int, rows: bool
) -> None:
    """Shards in rank order are the flat parameter, which views to the originals."""
    regions = [
        region_of(parameters(), world_size=world_size, rank=rank, rows=rows)
        for rank in range(world_size)
    ]
    originals = parameters()

    region = regions[0]
    gather(region, [each.shard for each in regions])

    for slot, full in zip(region.layout.parameters, region.full.leaves, strict=True):
        assert torch.equal(full, originals[int(slot.fqn)])
        assert full.data_ptr() % 16 == 0 or not full.numel()
    _, padding = full_views(region.layout, region.full.buffer)
    assert all(not piece.any() for piece in padding)


def test_writing_into_full_leaves_the_version_of_full_leaves_alone() -> None:
    """What autograd saved stays valid when a gather writes the same values again."""
    region = region_of(parameters([(4, 2)]), world_size=2)
    gather(region, [region.shard, region.shard])
    (leaf,) = region.full.leaves
    version = leaf._version
    x = torch.ones(3, 4, requires_grad=True)
    loss: Any = (x @ leaf).sum()
    expected = leaf.detach().sum(1).expand(3, 4).clone()

    gather(region, [region.shard, region.shard])
    loss.backward()

    assert leaf._version == version
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
