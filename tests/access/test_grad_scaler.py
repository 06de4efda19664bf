"""``ShardedGradScaler``: one decision on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import ShardedGradScaler, fully_shard
from composable_fsdp.comm.collectives import record
from composable_fsdp.features import flat_parameters
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, loss_of, sgd, wide_input
from tests.support.world import World

x_of = wide_input(8)


def scaler_of(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, **options)


@pytest.mark.req("B-21", "X-15")
@on_ranks(1, 3)
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("how", ["step", "unscale first"])
@pytest.mark.parametrize("over", [nn.Module.parameters, flat_parameters])
def test_what_one_rank_found_makes_all_skip_and_back_off(
    world: World, over: Callable[[nn.Module], Any], how: str, value: float
) -> None:
    """The second step is skipped and halves the scale; two good ones double it."""
    model = fully_shard(tiny_mlp())
    held = list(over(model))
    optimizer, scaler = sgd(held), scaler_of()
    seen = []
    for at in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        backward(scaler.scale(loss_of(model, x_of(at, world.rank))))
        if at == 1 and world.rank == world.world_size - 1:
            gradient = next(p.grad for p in held if p.numel())
            assert gradient is not None
            gradient[0] = value
        if how == "unscale first":
            scaler.unscale_(optimizer)
        with record() as calls:
            scaler.step(optimizer)
        alone = world.world_size == 1 or how == "unscale first"
        assert [call.op for call in calls] == ["all_reduce"] * (not alone)
        scaler.update()
        optimizer.zero_grad()
        same = all(map(torch.equal, before, model.parameters()))
        seen.append((same, scaler.get_scale()))

    assert seen == [(False, 8.0), (True, 4.0), (False, 4.0), (False, 8.0)]


@pytest.mark.req("B-21")
@on_ranks(3)
def test_half_precision_gradients_and_none_at_all_decide_alike(world: World) -> None:
    """A rank without a gradient learns what the others found, in a group of its own."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_of(process_group=dist.new_group())
    scaler.scale(torch.ones(()))
    for value, scale in ((8.0, 8.0), (math.inf, 4.0)):
        if world.rank == 0:
            weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [float(world.rank > 0)] * 2
        assert scaler.get_scale() == scale


def test_a_scaled_loss_keeps_its_dtype() -> None:
    """A half precision loss stays one."""
    scaled = scaler_of().scale(torch.ones((), dtype=torch.float16))

    assert scaled.dtype == torch.float16
    assert scaled.item() == 8.0
