"""What leaves the GPU, and what stays: full values and states over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
    unshard_params,
)
from composable_fsdp.access import stream_full, stream_plan
from tests.gpu.counts import NEEDS_NCCL
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    adamw,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
)
from tests.support.world import World

pytestmark = NEEDS_NCCL


def devices_of(values: dict[str, torch.Tensor]) -> set[str]:
    return {value.device.type for value in values.values()}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@on_ranks()
def test_full_values_go_where_they_are_asked_for(
    world: World, strategy: ShardingStrategy
) -> None:
    """Host memory or the GPU; the model itself stays on the GPU."""
    model: nn.Module = TinyGPT().to(world.device)
    model = apply_units(model, gpt_units(TinyGPT()), strategy=strategy)
    optimizer, scaler = adamw(model.parameters()), ShardedGradScaler(init_scale=8.0)
    tokens = gpt_input(0, world.rank).to(world.device)
    backward(scaler.scale(loss_of(model, tokens)))
    scaler.step(optimizer)
    scaler.update()
    whole = model.state_dict()

    with unshard_params(model, offload_to_cpu=True, with_grads=True):
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        assert devices_of(parameters) == {"cpu"}
        assert {gradient.device.type for gradient in gradients} == {"cpu"}
        for parameter in parameters.values():
            parameter.data.add_(1.0)
    assert devices_of(dict(model.named_parameters())) == {"cuda"}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, whole[name] + 1.0)

    for to_cpu, device in ((True, "cpu"), (False, "cuda")):
        with state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(to_cpu, rank0_only=True),
            FullOptimStateDictConfig(to_cpu, rank0_only=True),
        ):
            saved, state = model.state_dict(), optim_state_dict(model, optimizer)
            part = optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(part)
        if world.rank == 0:
            assert devices_of(saved) == {device}
            assert state["state"]["head.weight"]["exp_avg"].device.type == device


# ---- whole tensors, one after the other ----


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
