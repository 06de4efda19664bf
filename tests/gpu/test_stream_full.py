"""Whole tensors out of a sharded model, on a GPU: order of streams, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import CPUOffload, fully_shard
from composable_fsdp.access import stream_full, stream_plan
from tests.gpu.counts import NEEDS_NCCL
from tests.support.on_ranks import on_ranks
from tests.support.world import World

pytestmark = NEEDS_NCCL


@pytest.mark.req("W-01")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks()
def test_buckets_are_right_and_within_the_planned_memory(
    world: World, dtype: torch.dtype | None, offload: bool
) -> None:
    """While kernels of the caller read one bucket and the next one is gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))).to(world.device)
    for layer in model:
        fully_shard(layer, cpu_offload=CPUOffload(offload_params=offload))
    fully_shard(model, cpu_offload=CPUOffload(offload_params=offload))
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    how: dict[str, Any] = {"max_bytes": 40 << 20, "dtype": dtype}
    for _ in stream_full(model, **how):  # NCCL's own buffers
        pass
    planned = stream_plan(model, **how)
    sums: dict[str, Any] = {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    for name, value in stream_full(model, **how):
        sums[name] = value.double().sum().item()
        assert value.is_cuda
        del value
    peak = torch.cuda.max_memory_allocated() - before

    for name, value in expected.items():
        assert sums[name] == pytest.approx(
            value.to(dtype or value.dtype).double().sum().item(), rel=1e-6, abs=1e-6
        )
    # The caller's sum in float64 of a weight, and blocks of 512 bytes.
    assert peak <= planned.peak_nbytes + (2048 * 2048 * 8) + 512 * 64
