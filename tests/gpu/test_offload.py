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
from composable_fsdp.doors.checkpoint_wrapper import checkpoint_wrapper
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


# ---- activations on the host ----

WIDTH, ROWS, BLOCKS = 1024, 4096, 12


class Late(nn.Module):
    """A block whose compute is late, so that a copy that waits for nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        SLEEP(1_000_000)
        return x + torch.tanh(self.up(x))


def run(*, offload: bool) -> tuple[list[Tensor], int]:
    """Gradients of two steps, and the peak of the second."""
    torch.manual_seed(0)
    blocks = [checkpoint_wrapper(Late(), offload=offload) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        backward(model(x).square().sum())
    assert x.grad is not None
    found = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.req("W-05")
def test_the_peak_is_that_of_two_blocks_and_the_numbers_are_equal() -> None:
    """Of twelve inputs eight at least leave the peak."""
    (mine, low), (expected, high) = run(offload=True), run(offload=False)
    assert all(map(torch.equal, mine, expected))
    assert high - low >= (BLOCKS - 4) * ROWS * WIDTH * 4
