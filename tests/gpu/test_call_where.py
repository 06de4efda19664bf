"""Units that some ranks do not run, over NCCL and on streams."""

from __future__ import annotations

import pytest
import torch

from composable_fsdp import BackwardPrefetch
from tests.features.where import Program, check_program
from tests.gpu.counts import NEEDS_NCCL
from tests.support.on_ranks import on_ranks
from tests.support.reference import STRATEGIES
from tests.support.world import World

pytestmark = NEEDS_NCCL


@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", ["nothing", "block", "span", "body"])
@on_ranks()
def test_ranks_drop_units_on_gpus(
    world: World, kept: str, strategy: object, prefetch: object
) -> None:
    """On any number of GPUs, also one, where every other call is dropped by all."""
    program = Program(
        drops=(1, 0, 2, 3, 0),
        kept=kept,
        strategy=strategy,  # type: ignore[arg-type]  # parametrized
        prefetch=prefetch,  # type: ignore[arg-type]  # parametrized
        micro=2,
    )
    check_program(world, program)
    torch.cuda.synchronize()
