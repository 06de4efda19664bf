"""Training on live ranks equals training the plain model, and the peers' results."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import ShardingStrategy
from composable_fsdp.comm import collectives
from composable_fsdp.config import HYBRID
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    adamw,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    loss_of,
    wide_input,
)
from tests.support.world import World

# ---- torch's DDP, with ranks that come late ----

WIDTH = 6
# Rows that two ranks share evenly, and rows that they do not.
HIDDEN = {"even": (8, 8), "uneven": (7, 3)}
UNITS = {"one": (), "many": ("0", "2", "4")}


def layers(hidden: tuple[int, int]) -> nn.Sequential:
    """Three linear layers."""
    torch.manual_seed(5)
    a, b = hidden
    return nn.Sequential(
        nn.Linear(WIDTH, a), nn.Tanh(), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 2)
    )


@contextmanager
def late(rank: int) -> Iterator[None]:
    """Let this rank come late, at random, to every collective of the package."""
    luck = random.Random(rank)
    with ExitStack() as stack:
        for name in ("all_gather_flat", "reduce_scatter_flat", "all_reduce"):
            stack.enter_context(_delayed(name, luck))
        yield


def _delayed(name: str, luck: random.Random) -> Any:
    send = getattr(collectives, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(luck.random() * 0.004)
        return send(*args, **kwargs)

    return patch.object(collectives, name, slow)


def steps(model: nn.Module, rank: int, *, set_to_none: bool) -> list[Tensor]:
    """Losses of three steps."""
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, wide_input(WIDTH)(step, rank))
        backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.few(3)
@pytest.mark.req("B-10")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)
@on_ranks(2)
def test_training_equals_ddp_bit_by_bit(
    world: World, strategy: ShardingStrategy, units: str, set_to_none: bool
) -> None:
    """Even and uneven rows, gradients cleared or zeroed, each rank late at times."""
    mesh = None
    if strategy in HYBRID:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for hidden in HIDDEN.values():
        model = layers(hidden)
        ddp = DistributedDataParallel(copy.deepcopy(model))
        theirs = steps(ddp, world.rank, set_to_none=set_to_none)
        apply_units(model, UNITS[units], strategy=strategy, device_mesh=mesh)

        with late(world.rank):
            ours = steps(model, world.rank, set_to_none=set_to_none)

        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        expected = dict(ddp.module.state_dict())
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)


@on_ranks(2)
def test_a_rank_whose_batch_is_empty_takes_part(world: World) -> None:
    """Its gradients are zeros, which count in the mean."""
    plain = layers(HIDDEN["uneven"])
    model = apply_units(copy.deepcopy(plain), UNITS["many"])
    batches = [wide_input(WIDTH)(0, 0), torch.ones(0, WIDTH)]

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = each(x).square().sum()
        return y

    averaged_gradients(plain, batches, loss)
    backward(loss(model, batches[world.rank]))
    for each in (plain, model):
        adamw(each.parameters()).step()

    assert_same_training(model, plain, [], [], tolerance=1e-6)
