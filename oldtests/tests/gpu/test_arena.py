"""Arenas on GPUs: addresses of a step, memory that is planned, windows of NCCL."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.device_steps import BF16, Chain, world
from composable_fsdp import fully_shard
from composable_fsdp.features import Arena
from tests.gpu.counts import NEEDS_NCCL
from tests.runtime.test_arena import addresses
from tests.support.models import TinyGPT
from tests.support.reference import apply_units, backward, gpt_input, gpt_units, loss_of
from tests.support.world import RankPool, World

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


def train_in_windows(world: World) -> None:
    """Steps over memory that NCCL has allocated and registered, as without."""
    plain = TinyGPT(layers=4).to(world.device)
    losses = []
    for arena in (None, Arena(comm_memory="nccl")):
        model = apply_units(copy.deepcopy(plain), gpt_units(plain), arena=arena)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = loss_of(model, gpt_input(step, world.rank).to(world.device))
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert torch.equal(*losses)


@pytest.mark.req("M-07")
def test_windows_of_nccl_hold_the_numbers(pool: RankPool) -> None:
    """On up to two GPUs, a rank each; one rank registers its memory, too."""
    pool.run(train_in_windows)
