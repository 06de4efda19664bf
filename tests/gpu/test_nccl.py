"""The headline and parity on GPUs over NCCL, on as many ranks as there are GPUs.

Run by ``make test-gpu``, also where only torch, safetensors and pytest are installed.
"""

from __future__ import annotations

import copy

import pytest
import torch

from composable_fsdp import ShardingStrategy
from composable_fsdp.comm.collectives import record
from tests.gpu.counts import NEEDS_NCCL
from tests.runtime.parity import trains_as
from tests.support.models import TinyGPT
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    gpt_input,
    gpt_units,
)
from tests.support.world import RankPool, World

pytestmark = NEEDS_NCCL


def train_on_gpu(world: World, path: str, strategy: ShardingStrategy) -> int:
    """Three steps against the plain model on the same GPU; the collectives sent."""
    model = TinyGPT().to(world.device)
    plain = copy.deepcopy(model)
    sharded = apply_units(model, gpt_units(model), path=path, strategy=strategy)

    def make(step: int, rank: int) -> torch.Tensor:
        return gpt_input(step, rank).to(world.device)

    with record() as calls:
        trains_as(world, sharded, plain, make, adamw, tolerance=1e-4)

    assert world.all_equal(sharded.state_dict())
    assert all(p.is_cuda for p in sharded.parameters())
    return len(calls)


@pytest.mark.req("S2-10")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_small_gpt_trains_as_the_plain_one(
    every_pool: RankPool, strategy: ShardingStrategy, path: str
) -> None:
    """Losses and weights of three steps agree, and one rank alone sends nothing."""
    sent = every_pool.run(train_on_gpu, path, strategy)

    assert len(set(sent)) == 1
    assert (sent[0] == 0) is (every_pool.world_size == 1)
