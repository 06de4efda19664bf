"""Programs that users write, on modules and tools of torch that no other test has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    ShardingStrategy,
)
from tests.runtime.parity import trains_as
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    sgd,
)
from tests.support.world import World

WIDTH = 6


def features(step: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, *(shape or (WIDTH,)), generator=generator)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Case(NamedTuple):
    """A model, its units below the root, and the shape of a row of its input."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...] = ("0", "2")
    shape: tuple[int, ...] = (WIDTH,)
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


@on_ranks(2)
def test_a_rank_whose_batch_is_empty_takes_part(world: World) -> None:
    """Its gradients are zeros, which count in the mean."""
    torch.manual_seed(0)
    plain = nn.Sequential(block(), nn.LayerNorm(WIDTH))
    model = apply_units(copy.deepcopy(plain), ["0", "1"])

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = each(x).square().sum()
        return y

    batches = [features(0, 0), features(0, 1)[:0]]
    averaged_gradients(plain, batches, loss)
    backward(loss(model, batches[world.rank]))
    for each in (plain, model):
        sgd(each.parameters()).step()

    assert_same_training(model, plain, [], [], tolerance=1e-6)


# ---- memory formats ----


def convolutions() -> Any:
    """Two convolutions and one in three dimensions, in channels_last."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.Unflatten(1, (2, 3)),
        nn.Conv3d(2, 5, 3, padding=1),
    )
    model[:4].to(memory_format=torch.channels_last)
    model[5].to(memory_format=torch.channels_last_3d)
    return model


@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=lambda each: each.name)
@on_ranks(1, 2)
def test_convolutions_in_channels_last_train_as_contiguous_ones(
    world: World, strategy: ShardingStrategy
) -> None:
    """Their weights are contiguous in forward and in state dicts."""
    expected = convolutions().to(memory_format=torch.contiguous_format)
    model = apply_units(convolutions(), ["0", "3"], strategy=strategy)
    make = lambda step, rank: features(step, 0, 3, 4, 4)  # noqa: E731

    trains_as(world, model, expected, make, adamw)

    for name, value in model.state_dict().items():
        assert value.is_contiguous()
        torch.testing.assert_close(value, expected.state_dict()[name])
