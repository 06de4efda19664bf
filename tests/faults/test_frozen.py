"""Ranks that freeze other parameters than the others are told so by name.

gloo ends the process at the first reduce-scatter whose sizes differ, so the ranks have
to raise before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import FSDPError, ShardingStrategy, fully_shard
from tests.support.on_ranks import on_ranks
from tests.support.short_waits import shorten_waits
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
SOON = 15.0
"""Seconds within which every rank has its error."""


class Blocks(nn.Module):
    """Three equal blocks; one parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 4)`` to the same."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


def sharded(strategy: str, mesh: DeviceMesh | None = None) -> Blocks:
    """A root and three units below."""
    model = Blocks()
    for module in (*model.blocks, model):
        fully_shard(module, strategy=ShardingStrategy[strategy], device_mesh=mesh)
    return model


def step(model: nn.Module) -> None:
    """A forward and a backward."""
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()


def freeze_other(
    world: World, strategy: str, steps: int, how: str
) -> tuple[str, float]:
    """After ``steps`` steps the last rank freezes (or the ranks freeze differently).

    Returns: the error of this rank, and its time.
    """
    shorten_waits()
    model = sharded(strategy)
    if how == "unfreezes":
        model.blocks[1].requires_grad_(requires_grad=False)
    for _ in range(steps):
        step(model)
    if world.rank == world.world_size - 1:
        model.get_parameter("blocks.1.weight").requires_grad_(how == "unfreezes")
    elif how == "another":
        model.get_parameter("blocks.2.bias").requires_grad = False
    start = time.monotonic()
    with pytest.raises(FSDPError) as caught:
        step(model)
    return str(caught.value), time.monotonic() - start


@pytest.mark.few
@pytest.mark.req("X-09")
@pytest.mark.parametrize(
    ("strategy", "steps", "how"),
    [
        ("FULL_SHARD", 1, "alone"),
        ("FULL_SHARD", 4, "alone"),
        ("NO_SHARD", 4, "alone"),
        ("FULL_SHARD", 4, "another"),
        ("FULL_SHARD", 4, "unfreezes"),
    ],
)
def test_ranks_that_freeze_other_parameters_raise_by_name(
    ranks: RankCount, strategy: str, steps: int, how: str
) -> None:
    """The parameter, the value on both ranks and the way out are in every error."""
    found = ranks(2).run(freeze_other, strategy, steps, how, timeout=60, retire=True)

    for text, took in found:
        assert took < SOON
        flag = how == "unfreezes"
        assert f"requires_grad={flag} of 'blocks.1.weight'" in text
        assert f"requires_grad={not flag} of 'blocks.1.weight'" in text
        assert "Set requires_grad of the same parameters on every rank" in text
        if how == "another":
            assert "requires_grad=False of 'blocks.2.bias'" in text


def freeze_other_replica(world: World, steps: int) -> tuple[str, float]:
    """After ``steps`` steps both ranks of the second replica freeze a parameter.

    Returns: the error of this rank, and its time.
    """
    shorten_waits()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded("HYBRID_SHARD", mesh)
    for _ in range(steps):
        step(model)
    if world.rank >= 2:
        model.get_parameter("blocks.1.weight").requires_grad = False
    start = time.monotonic()
    with pytest.raises(FSDPError) as caught:
        step(model)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.req("X-09")
def test_replicas_that_freeze_other_parameters_raise_by_name(
    ranks: RankCount, steps: int
) -> None:
    """The ranks of a shard group agree, and the ranks of a replicate group do not.

    After 4 steps the ranks predict every round.
    """
    found = ranks(4).run(freeze_other_replica, steps, timeout=60, retire=True)

    for text, took in found:
        assert took < SOON
        assert "requires_grad=False of 'blocks.1.weight'" in text
        assert "requires_grad=True of 'blocks.1.weight'" in text


@pytest.mark.req("D-07")
@on_ranks(4)
def test_a_replica_may_evaluate_alone_at_any_time(world: World) -> None:
    """The order of its shard group then differs from that of the other replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded("HYBRID_SHARD", mesh)
    for evaluations in (0, 0, 0, 0, 1, 2, 1, 0, 3):
        step(model)
        if world.rank < 2:
            for _ in range(evaluations):
                with torch.no_grad():
                    model(torch.ones(1, 4))
    step(model)


def freeze_in_turn(world: World, strategy: str) -> bool:
    """Every rank freezes a parameter, unfreezes it, and trains on."""
    model = sharded(strategy)
    for index in range(12):
        model.get_parameter("blocks.1.weight").requires_grad_(index % 2 == 0)
        model(torch.ones(2, 4)).sum().backward()
        assert (model.get_parameter("blocks.1.weight").grad is None) == (index % 2 == 1)
        model.zero_grad()
    return True


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_ranks_that_freeze_alike_train_on(ranks: RankCount, strategy: str) -> None:
    """A parameter that all ranks freeze and unfreeze in turn is no difference."""
    assert all(ranks(2).run(freeze_in_turn, strategy, timeout=60))
