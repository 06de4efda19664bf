"""``checkpoint_wrapper(offload=True)``: order of the copies, numbers, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import CustomPolicy, forecast, fully_shard, plan
from composable_fsdp.doors.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from composable_fsdp.features.host_memory.copies import _Block
from composable_fsdp.tools.activations import measure_activations
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World

WIDTH = 16
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": lambda m: checkpoint_wrapper(m, offload=True),
    "reentrant": lambda m: checkpoint_wrapper(
        m, CheckpointImpl.REENTRANT, offload=True
    ),
    "saved": offload_wrapper,
    "recomputed": checkpoint_wrapper,
    "again": lambda m: checkpoint_wrapper(m, CheckpointImpl.REENTRANT),
    "plain": lambda m: m,
}


def blocks_of(wrap: Callable[[nn.Module], nn.Module], count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*map(wrap, blocks))


def gradients(model: nn.Module, x: Tensor, *, twice: bool) -> list[Tensor]:
    """Of two forwards before one backward, or of a second backward."""
    x = x.clone().requires_grad_()
    loss = model(x).sum() + model(2 * x).square().sum()
    if twice:
        torch.autograd.backward(loss, retain_graph=True)
        model.zero_grad()
        x.grad = None
    backward(loss)
    assert x.grad is not None
    return [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.req("W-05")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("name", "other"),
    [("checkpoint", "recomputed"), ("reentrant", "again"), ("saved", "plain")],
)
@on_ranks(2)
def test_gradients_are_those_without_offload(
    world: World, name: str, other: str, twice: bool
) -> None:
    """Bit by bit, of sharded blocks; two forwards, two backwards."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    found = []
    for each in (name, other):
        model = blocks_of(WRAPS[each])
        for block in model:
            fully_shard(block)
        found.append(gradients(fully_shard(model), x, twice=twice))
    assert all(map(torch.equal, *found))


@pytest.mark.req("W-05")
def test_copies_come_back_a_block_ahead_in_the_recorded_order() -> None:
    """Two blocks are on the device at a time; the last two have never left it."""
    model = blocks_of(WRAPS["checkpoint"])
    made: list[_Block] = []
    most: list[int] = []
    fetched: list[int] = []
    end, fetch = _Block.end, _Block.fetch

    def note_end(block: _Block) -> None:
        end(block)
        made.append(block)
        most.append(on_device())

    def note_fetch(block: _Block) -> None:
        fetch(block)
        if block in made:
            fetched.append(made.index(block))
            most.append(on_device())

    def on_device() -> int:
        return sum(bool(block.here) for block in made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Block, "end", note_end)
        patch.setattr(_Block, "fetch", note_fetch)
        backward(model(torch.randn(2, WIDTH, requires_grad=True)).sum())
    assert fetched == [3, 2, 1, 0]
    assert max(most) == 2


@pytest.mark.req("W-05")
@on_ranks(1)
def test_parameters_of_units_are_not_copied(world: World) -> None:
    """A unit frees and fills them itself, without regard to the copies."""
    torch.manual_seed(0)
    inner = [fully_shard(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    model = fully_shard(nn.Sequential(*map(offload_wrapper, inner)))
    kept: list[torch.Size] = []
    save = _Block.save

    def note(block: _Block, tensor: Tensor) -> Any:
        kept.append(tensor.shape)
        return save(block, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Block, "save", note)
        loss = model(torch.randn(3, WIDTH)).sum()
    assert kept
    assert set(kept) == {torch.Size((3, WIDTH))}
    backward(loss)


@pytest.mark.req("W-05")
@pytest.mark.parametrize("more", [0, 3], ids=["here", "left"])
def test_a_write_over_what_a_block_saved_is_told(more: int) -> None:
    """As without offload; no gradient of other values."""
    block = offload_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))
    x = torch.randn(2, WIDTH)

    def run() -> None:
        y = block(x)
        y.add_(1)
        # Blocks that have it leave the device.
        for _ in range(more):
            block(x)
        torch.autograd.backward(y.sum())

    with pytest.raises(RuntimeError, match="written in place"):
        run()


@pytest.mark.req("W-05")
def test_the_forecast_counts_two_blocks() -> None:
    """Without offload each block more has an input more on the device."""
    x = torch.zeros(64, WIDTH, requires_grad=True)
    peaks: dict[str, list[int]] = {}
    for name in ("checkpoint", "recomputed"):
        for count in (6, 12):
            model = blocks_of(WRAPS[name], count)
            units = CustomPolicy(lambda m, root=model: m in list(root))  # type: ignore[misc]  # lambda
            planned = plan(model, world_size=2, policy=units)
            found = measure_activations(model, planned, [x])
            moments = forecast(planned, activations=found).moments
            most = max(moment.memory.activations for moment in moments)
            peaks.setdefault(name, []).append(most)
    few, many = peaks["recomputed"]
    assert many - few == 6 * x.nbytes
    few, many = peaks["checkpoint"]
    assert many == few
