"""Units that some ranks do not run, on the streams of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from composable_fsdp import BackwardPrefetch, ShardingStrategy
from tests.features.where import Program, check_program
from tests.gpu.counts import NEEDS_NCCL
from tests.support.reference import STRATEGIES
from tests.support.world import RankPool, World

pytestmark = NEEDS_NCCL


@pytest.fixture(scope="module")
def shared() -> Iterator[RankPool]:
    with RankPool(2, "gloo") as ranks:
        yield ranks


def on_gpu(world: World, program: Program) -> None:
    """`check_program` on the first GPU, or on that of the rank."""
    device = torch.device("cuda", world.rank if world.backend == "nccl" else 0)
    check_program(replace(world, device=device), program)
    torch.cuda.synchronize()


@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", ["nothing", "block", "span", "body"])
def test_ranks_drop_units_on_a_gpu(
    shared: RankPool,
    kept: str,
    strategy: ShardingStrategy,
    prefetch: BackwardPrefetch | None,
) -> None:
    """Values travel between ranks on the side streams, as on the CPU."""
    drops = (1, 0, 2, 3, 0)
    program = Program(
        drops, kept=kept, strategy=strategy, prefetch=prefetch, micro=2, calls=2
    )
    shared.run(on_gpu, program)


def test_ranks_drop_units_over_nccl(pool: RankPool) -> None:
    """The host waits for the byte of the GPU."""
    pool.run(on_gpu, Program((1, 0, 2, 3, 0), kept="block"))
