"""Arenas on GPUs: addresses of a step, memory that is planned."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_steps import BF16, Chain, world
from composable_fsdp import fully_shard
from composable_fsdp.features import Arena
from tests.gpu.counts import NEEDS_NCCL
from tests.runtime.test_arena import addresses
from tests.support.reference import backward

pytestmark = NEEDS_NCCL


@pytest.mark.req("M-07")
@pytest.mark.parametrize("kind", ["one", "fake"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_step_has_the_addresses_and_numbers_of_the_step_before(
    shared: bool, kind: str
) -> None:
    """With casts on the gather stream, and slots that are poisoned between."""
    device = torch.device("cuda", torch.cuda.current_device())
    results, seen = [], []
    with world(kind, device):
        for arena in (None, Arena(shared=shared, poison=True)):
            torch.manual_seed(0)
            model = Chain(256, device)
            for layer in model.layers:
                fully_shard(layer, mixed_precision=BF16, arena=arena)
            fully_shard(model, mixed_precision=BF16, arena=arena)
            row = model.row.clone().requires_grad_()
            for _ in range(5):
                output = model(row)
                backward(output.float().sum())
                seen.append(addresses(model))
            assert row.grad is not None
            found = [output.detach().float(), row.grad]
            if kind == "one":  # a reduce-scatter of ``fake`` writes nothing
                found += [p.grad for p in model.parameters() if p.grad is not None]
            results.append(torch.cat([each.flatten() for each in found]))

    assert seen[5:].count(seen[5]) == 5
    assert torch.equal(*results)
