"""A backward inside a forward: forces from energies, penalties on gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def _grad(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, retain_graph=True)[0]


def _graph(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def _backward(energy: Tensor, x: Tensor) -> Tensor:
    torch.autograd.backward(energy, retain_graph=True)
    assert x.grad is not None
    return x.grad


FORCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grad": _grad,
    "grad with a graph": _graph,
    "backward": _backward,
}


class Forces(nn.Module):
    """An energy, and its gradient by the input, which a layer of the root reads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Linear(3, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 3)`` to ``(batch, 1)``."""
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            energy = self.body(self.embed(x))
            forces = FORCES[self.way](energy.sum(), x)
        return torch.as_tensor(energy + torch.tanh(forces * self.scale).sum(1, True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", FORCES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_backward_inside_a_forward_leaves_its_unit_full(
    world: World, path: str, way: str, strategy: ShardingStrategy
) -> None:
    """What comes after it in the forward computes with the same weights.

    Train on this rank's input and compare.
    """
    torch.manual_seed(0)
    reference = Forces(way)
    model = apply_units(
        copy.deepcopy(reference), ["body"], path=path, strategy=strategy
    )
    expected = train_reference(reference, 2, wide_input(3), adamw)

    losses = train(model, world.rank, wide_input(3), adamw)

    mine = [step[world.rank] for step in expected]
    assert_same_training(model, reference, losses, mine, tolerance=1e-6)
