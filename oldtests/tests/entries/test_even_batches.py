"""Ranks with different numbers of batches make the same steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    FullyShardedDataParallel,
    clip_grad_norm_,
    fully_shard,
    get_full_param,
)
from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError
from composable_fsdp.features import even_batches
from tests.support.on_ranks import on_ranks
from tests.support.world import World

pytestmark = pytest.mark.req("X-16")


def batches_of(rank: int) -> list[Tensor]:
    """As many batches as the rank's number, and one more."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, generator=generator) for _ in range(rank + 1)]


def plain() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sharded(door: str) -> nn.Module:
    """The same model, of two units."""
    model = plain()
    if door == "wrapper":
        model[0] = FullyShardedDataParallel(model[0])
        return FullyShardedDataParallel(model)
    fully_shard(model[0])
    return fully_shard(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state depends on every step."""
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def losses_of_the_plain_model(
    world_size: int, *, divide_by_all: bool
) -> tuple[list[float], nn.Module]:
    """Train on the batches that exist in each turn; the losses of the mean."""
    model = plain()
    optimizer, losses = optimizer_of(model), []
    for turn in range(world_size):
        every = [batches_of(rank) for rank in range(world_size)]
        now = [batches[turn] for batches in every if turn < len(batches)]
        total = torch.stack([model(x).square().mean() for x in now]).sum()
        loss = total / (world_size if divide_by_all else len(now))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("divide_by_all", [False, True])
@pytest.mark.parametrize("door", ["composable", "wrapper"])
@on_ranks(2, 3)
def test_padded_training_is_that_of_the_plain_model_on_the_real_batches(
    world: World, door: str, divide_by_all: bool
) -> None:
    """With clipping and optimizer state, by the mean over ranks that have a batch, or
    over all ranks."""
    expected, reference = losses_of_the_plain_model(
        world.world_size, divide_by_all=divide_by_all
    )
    model = sharded(door)
    optimizer, own = optimizer_of(model), []

    for x, weight in even_batches(batches_of(world.rank), model, policy="pad"):
        scale = float(weight > 0) if divide_by_all else weight
        loss = model(x).square().mean() * scale
        loss.backward()
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        own.append(float(loss.detach()))

    assert len(own) == world.world_size
    means = torch.tensor(world.gather(own)).mean(0)
    assert torch.allclose(means, torch.tensor(expected), rtol=1e-5)
    for name, parameter in reference.named_parameters():
        full = get_full_param(model, name)
        assert torch.allclose(full, parameter, rtol=1e-4, atol=1e-6), name


@on_ranks(3)
def test_the_shortest_loader_ends_the_loop_of_all_ranks(world: World) -> None:
    """Every weight is 1, and each turn sends 24 bytes beside the step."""
    model, mine = sharded("composable"), batches_of(world.rank)
    with collectives.record() as calls:
        seen = list(even_batches(mine, model))

    assert [weight for _, weight in seen] == [1.0]
    assert seen[0][0] is mine[0]
    # One for the turn, and one in which rank 0 has run out.
    assert [(call.op, call.nbytes) for call in calls] == [("all_reduce", 24)] * 2


@on_ranks(2)
def test_different_lengths_can_be_an_error_on_all_ranks(world: World) -> None:
    """After the turns that all ranks share."""
    turns = even_batches(batches_of(world.rank), sharded("composable"), policy="error")
    next(turns)
    with pytest.raises(DesyncError, match="rank 0 has 1, rank 1 has at least 2"):
        next(turns)


@on_ranks(2)
def test_a_rank_without_batches_has_none_to_repeat(world: World) -> None:
    """All ranks say which rank."""
    mine = batches_of(0) if world.rank else []
    with pytest.raises(DesyncError, match=r"rank 0 has 0, .*has none to repeat"):
        next(even_batches(mine, sharded("composable"), policy="pad"))


@on_ranks(2)
def test_a_loader_that_raises_ends_the_loop_of_all_ranks(world: World) -> None:
    """Its rank raises the error itself, the others name the rank."""

    def broken() -> Iterator[Tensor]:
        yield torch.ones(2, 4)
        raise OSError("a bad sample")

    mine = broken() if world.rank else iter(batches_of(2))
    turns = even_batches(mine, sharded("composable"))
    next(turns)
    if world.rank:
        with pytest.raises(OSError, match="a bad sample"):
            next(turns)
        return
    with pytest.raises(DesyncError, match="rank 1 raised OSError: a bad sample"):
        next(turns)
