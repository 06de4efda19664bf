"""The two calls of every step with what a model may bring, on live ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from composable_fsdp.comm import collectives
from tests.support.on_ranks import on_ranks
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.complex64,),
        (torch.complex64, torch.complex64),
        (torch.complex64, torch.float32),
    ],
    ids=lambda dtypes: "-".join(str(d).removeprefix("torch.") for d in dtypes),
)
@on_ranks(2)
def test_regions_of_every_dtype_are_gathered_and_reduced(
    world: World, dtypes: tuple[torch.dtype, ...]
) -> None:
    """One region or several at once; no backend knows complex numbers.

    Rank *r* sends ``r + 1``: gathered in rank order, and summed.
    """
    size, group = world.world_size, world.group
    shards = [torch.full((2,), world.rank + 1, dtype=dtype) for dtype in dtypes]
    fulls = [torch.zeros(2 * size, dtype=dtype) for dtype in dtypes]
    collectives.all_gather_flat(fulls, shards, group)
    numbers = torch.arange(1, size + 1).repeat_interleave(2)
    for full in fulls:
        assert torch.equal(full, numbers.to(full.dtype))

    if len(set(dtypes)) == 1:
        sums = [torch.zeros_like(shard) for shard in shards]
        sent = [s.repeat(size) for s in shards]
        collectives.reduce_scatter_flat(sums, sent, group)
        for total in sums:
            assert torch.equal(total, torch.full_like(total, size * (size + 1) / 2))
