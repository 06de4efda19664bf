"""Offloaded training on a rank, on whatever device the rank has; run on CPU and GPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    ShardingStrategy,
    get_full_grad,
    no_sync,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.parity import trains_as
from tests.support.models import TinyGPT
from tests.support.reference import (
    Input,
    adamw,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    gradients_of,
    loss_of,
)
from tests.support.world import World

OFFLOAD = CPUOffload(offload_params=True)
CPU = torch.device("cpu")


def offloaded_gpt(
    world: World, path: str = "composable", **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded offloaded GPT, and its plain copy on the rank's device."""
    model = TinyGPT()
    plain = copy.deepcopy(model).to(world.device)
    options = {"cpu_offload": OFFLOAD, **options}
    sharded = apply_units(model, gpt_units(model), path=path, **options)
    return sharded, plain


def inputs_on(world: World) -> Input:
    return lambda step, rank: gpt_input(step, rank).to(world.device)


def assert_at_home(model: nn.Module, world: World) -> None:
    """Shards and gradients are on the host, pinned for CUDA; ``full`` is not."""
    pinned = world.device.type == "cuda"
    for handle in _get_fsdp_handles(model):
        assert handle.layout.device == world.device
        assert not handle.is_full
        for region in handle.layout.regions:
            assert region.full.buffer.device == world.device
            assert region.full.buffer.untyped_storage().nbytes() == 0
            for tensor in (region.shard, region.gradient.shard):
                if tensor is not None:
                    assert tensor.device == CPU
                    assert tensor.is_pinned() is pinned
    for parameter in model.parameters():
        assert parameter.device == CPU
        assert parameter.grad is None or parameter.grad.device == CPU


def train_offloaded(
    world: World,
    path: str,
    strategy: ShardingStrategy,
    tolerance: float,
    max_norm: float | None = None,
) -> None:
    """Three steps against the plain model, and where the parameters are by then."""
    sharded, plain = offloaded_gpt(world, path, strategy=strategy)
    assert_at_home(sharded, world)

    make = inputs_on(world)
    trains_as(world, sharded, plain, make, adamw, tolerance=tolerance, clip=max_norm)
    assert world.all_equal(sharded.state_dict())


def three_points(world: World, strategy: ShardingStrategy) -> None:
    """After init, after forward, after backward: the parameters are on the host."""
    sharded, _ = offloaded_gpt(world, strategy=strategy)
    x = inputs_on(world)(0, world.rank)
    assert_at_home(sharded, world)

    with torch.no_grad():
        sharded(x)
    assert_at_home(sharded, world)

    backward(loss_of(sharded, x))
    assert_at_home(sharded, world)
    assert all((p.grad is None) == (not p.numel()) for p in sharded.parameters())


def accumulate(world: World, strategy: ShardingStrategy, how: str) -> None:
    """Three microbatches, in ``no_sync`` or not; gradients are their sum."""
    sharded, plain = offloaded_gpt(world, strategy=strategy)
    make = inputs_on(world)
    sums: dict[str, Tensor] = {}
    for step in range(3):
        inputs = [make(step, rank) for rank in range(world.world_size)]
        for name, value in gradients_of(plain, inputs).items():
            sums[name] = sums[name] + value if name in sums else value

    for step in range(3):
        loss = loss_of(sharded, make(step, world.rank))
        if how == "no_sync" and step < 2:
            with no_sync(sharded):
                backward(loss)
        else:
            backward(loss)

    assert_at_home(sharded, world)
    for name, value in sums.items():
        found = get_full_grad(sharded, name)
        assert found is not None
        torch.testing.assert_close(found.cpu(), value.cpu(), rtol=1e-5, atol=1e-6)
