"""What the tests of optimizers share: a model of every kind of parameter, and steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference import (
    apply_units,
    averaged_gradients,
    backward,
    loss_of,
    wide_input,
)
from tests.support.world import World


class Mixed(nn.Module):
    """Matrices, vectors, a 0-d parameter, a frozen one, and one that nothing uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / 2)

        self.first, self.second = nn.Linear(8, 5), nn.Linear(5, 3)
        for linear in (self.first, self.second):
            linear.weight = drawn(*linear.weight.shape)
            linear.bias = drawn(*linear.bias.shape)
        self.scale = drawn()
        self.unused = drawn(4)
        self.fixed = drawn(8)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x * self.scale + self.fixed).tanh()
        out: Tensor = self.second(hidden)
        return out


INPUT = wide_input(8)


def mixed(path: str, seed: int = 0, **options: Any) -> nn.Module:
    """``Mixed`` of three units."""
    return apply_units(Mixed(seed), ["first", "second"], path=path, **options)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and all else with a learning rate of its own."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": rest, "lr": 0.03}, {"params": matrices}]


def train_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, steps: range
) -> None:
    """Step on the mean gradients of all ranks' inputs."""
    for at in steps:
        averaged_gradients(model, [INPUT(at, rank) for rank in range(ranks)])
        optimizer.step()


def train_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: range
) -> None:
    """Step on this rank's input."""
    for at in steps:
        backward(loss_of(model, INPUT(at, world.rank)))
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a plain model's optimizer, with names in the place of numbers."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    plain = copy.deepcopy(optimizer.state_dict())
    return {
        "state": {order[i]: values for i, values in plain["state"].items()},
        "param_groups": [
            {**group, "params": [order[i] for i in group["params"]]}
            for group in plain["param_groups"]
        ],
    }
