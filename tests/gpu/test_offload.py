"""CPU offload on CUDA: pinned shards, asynchronous copies, and a stream that is late.

The stress tests put a long sleep on the reduce stream before each copy to the host. A
host that reads a gradient too soon then reads memory that was poisoned.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy
from composable_fsdp.runtime import offload
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.gpu.counts import NEEDS_NCCL
from tests.runtime.offloading import (
    accumulate,
    inputs_on,
    offloaded_gpt,
    three_points,
    train_offloaded,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    adamw,
    assert_same_training,
    backward,
    loss_of,
    train_reference,
)
from tests.support.world import RankPool, World

CYCLES = 20_000_000
"""Some milliseconds of sleep on a GPU."""
SLEEP: Callable[[int], None] = vars(torch.cuda)["_sleep"]

pytestmark = NEEDS_NCCL
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


@all_strategies
def test_an_offloaded_gpt_trains_and_accumulates_as_the_plain_one(
    pool: RankPool, strategy: ShardingStrategy
) -> None:
    """The model was never moved to the GPU by hand; parameters are on the host, pinned,
    after init, forward and backward, and so is the sum of three microbatches."""
    pool.run(train_offloaded, "composable", strategy, 1e-4)
    pool.run(train_offloaded, "wrapper", strategy, 1e-4, 0.05)
    pool.run(three_points, strategy)
    for how in ("every time", "no_sync"):
        pool.run(accumulate, strategy, how)


def late_copies(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Copies before which the stream sleeps; until then the host would read NaN."""

    def issue(target: Tensor, source: Tensor) -> None:
        regions = [
            r for handle in _get_fsdp_handles(model) for r in handle.layout.trainable
        ]
        to_host = any(target is region.gradient.shard for region in regions)
        if to_host and not any(r.host_copies for r in regions):
            target.fill_(float("nan"))
        SLEEP(CYCLES)
        target.copy_(source, non_blocking=True)

    return issue


@pytest.mark.req("S1-37")
@all_strategies
@on_ranks()
def test_the_optimizer_never_reads_half_a_gradient(
    world: World, strategy: ShardingStrategy
) -> None:
    """With the reduce stream late by milliseconds per copy, training is the same."""
    model, plain = offloaded_gpt(world, strategy=strategy)
    make = inputs_on(world)
    expected = train_reference(plain, world.world_size, make, adamw, steps=4)
    optimizer = adamw(model.parameters())
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "copy_async", late_copies(model))
        for step in range(4):
            loss = loss_of(model, make(step, world.rank))
            backward(loss)
            gradients = [
                p.grad.clone() for p in model.parameters() if p.grad is not None
            ]
            optimizer.step()
            torch.cuda.synchronize()

            # What was read at once is what is there when nothing moves any more.
            held = [p for p in model.parameters() if p.numel()]
            for gradient, parameter in zip(gradients, held, strict=True):
                assert parameter.grad is not None
                assert torch.equal(gradient, parameter.grad)
                assert not gradient.isnan().any()
            optimizer.zero_grad()
            losses.append(loss.item())

    mine = [step[world.rank] for step in expected]
    assert_same_training(model, plain, losses, mine, tolerance=1e-4)


@on_ranks()
def test_shards_may_be_written_right_after_a_forward(world: World) -> None:
    """The copies to the GPU are through by then: the output is that of the weights."""
    model, plain = offloaded_gpt(world)
    x = inputs_on(world)(0, world.rank)
    with torch.no_grad():
        model(x)
        wanted = plain(x)
        for _ in range(5):
            weights = [p.clone() for p in model.parameters()]
            SLEEP(CYCLES)
            got = model(x)
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)
