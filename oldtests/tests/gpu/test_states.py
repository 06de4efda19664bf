"""What leaves the GPU, and what stays: full values and states over NCCL."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
    unshard_params,
)
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
