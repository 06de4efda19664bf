"""Training beside peers; on one GPU by gloo, as NCCL refuses two ranks on one.

gloo copies to the host and back on streams of its own: each copy out is behind what the
current stream was given, and ``wait`` puts the current stream behind each copy in. So
the side streams carry real values between ranks, on a machine with one GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import CPUOffload, MixedPrecision, ShardingStrategy
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
OWN = MixedPrecision()
WIDER = MixedPrecision(reduce_dtype=torch.float64)


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, "gloo") as ranks:
        yield ranks


def replicas(world: World) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's (shard, replicate) groups of a grid with rows of two."""
    half = world.world_size // 2
    rows = [dist.new_group([2 * i, 2 * i + 1]) for i in range(half)]
    columns = [dist.new_group(list(range(i, 2 * half, 2))) for i in range(2)]
    return rows[world.rank // 2], columns[world.rank % 2]


def train_beside_peers(
    world: World,
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    offload: bool,
    frozen: bool = False,
) -> None:
    """Three steps on the GPU that all share, against the plain model on it."""
    world = replace(world, device=torch.device("cuda", 0))
    model = TinyGPT().to(world.device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.endswith("weight")))
    plain = copy.deepcopy(model)
    groups = replicas(world) if strategy is ShardingStrategy.HYBRID_SHARD else None
    sharded = apply_units(
        model,
        gpt_units(model),
        strategy=strategy,
        process_group=groups,
        device_id=0,
        mixed_precision=precision,
        cpu_offload=CPUOffload(offload_params=offload),
    )

    def make(step: int, rank: int) -> torch.Tensor:
        return gpt_input(step, rank).to(world.device)

    trains_as(world, sharded, plain, make, adamw, tolerance=1e-4)
    home = "cpu" if offload else "cuda"
    assert all(p.device.type == home for p in sharded.parameters())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", [OWN, WIDER], ids=["own", "wider"])
@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, ShardingStrategy.HYBRID_SHARD], ids=lambda each: each.name
)
def test_ranks_on_one_gpu_train_as_the_plain_model(
    pool: RankPool,
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    offload: bool,
) -> None:
    """Losses and weights of three steps agree with real peers, where gloo sums and we
    divide."""
    if strategy is ShardingStrategy.HYBRID_SHARD and pool.world_size < 4:
        pytest.skip("replicas of two shards each take four ranks")
    pool.run(train_beside_peers, strategy, precision, offload)


def test_units_of_several_regions_are_gathered_on_one_gpu(pool: RankPool) -> None:
    """Frozen and trainable parameters of a unit: gloo has no such call for CUDA."""
    pool.run(train_beside_peers, ShardingStrategy.FULL_SHARD, OWN, False, True)


# ---- NCCL, on as many ranks as there are GPUs ----


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
