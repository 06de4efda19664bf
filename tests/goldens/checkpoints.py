"""Checkpoints, written once and kept; every later commit loads them.

``python -m tests.goldens --write-checkpoints`` writes those that are missing. One that
exists is never written over: what a release wrote stays readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable_fsdp import (
    CustomPolicy,
    LoadOptions,
    fully_shard,
    load,
    optim_state_dict,
    save,
)
from tests.goldens.model import sines
from tests.support.world import World

FOLDER = Path(__file__).parent / "checkpoints"
WORLD_SIZES = (1, 2, 3)
EXTRA: dict[str, Any] = {
    "epoch": 3,
    "loss": float("inf"),
    "names": ["first", None, True],
    "order": torch.arange(5),
    "nested": {"rate": 0.5, "empty": torch.empty(0, 2)},
}
UNITS = ("inner", "low")

State = dict[str, Any]
Optimizers = list[torch.optim.Optimizer]


class Saved(nn.Module):
    """A model with everything that a file of parameters trips over."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 7)
        self.low = nn.Linear(7, 4).bfloat16()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor([seed, 2, 3]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(0.5 * sines(param.shape, i + seed))
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids ``(batch,)`` to logits ``(batch, 5)``."""
        inner = torch.tanh(self.inner(self.embed(x)))
        low = self.low(inner.bfloat16()).float()
        return cast(Tensor, self.head(low)) * self.scale + self.nothing.sum()


def make(seed: int, *, sharded: bool = True, **options: Any) -> nn.Module:
    """Return the model, sharded over all ranks with a unit for each of `UNITS`."""
    model = Saved(seed)
    if not sharded:
        return model
    chosen = [model.get_submodule(unit) for unit in UNITS]
    policy = CustomPolicy(lambda module: any(module is each for each in chosen))
    return fully_shard(model, policy=policy, **options)


def optimizers_of(model: nn.Module) -> Optimizers:
    """Return AdamW over two groups, and SGD with momentum over the bfloat16 unit."""
    low = [param for param in model.parameters() if param.dtype == torch.bfloat16]
    others = [param for param in model.parameters() if param.dtype != torch.bfloat16]
    groups: list[State] = [
        {"params": others[:3], "lr": 0.05},
        {"params": others[3:], "lr": 0.02, "betas": (0.8, 0.9)},
    ]
    momentum = torch.optim.SGD(low, lr=0.1, momentum=0.9)
    return [torch.optim.AdamW(groups, eps=1e-3), momentum]


def train(model: nn.Module, optimizers: Optimizers) -> None:
    """Take two steps, on the same tokens on every rank."""
    for step in range(2):
        tokens = torch.arange(5) + step
        loss = F.cross_entropy(model(tokens % 5), (tokens + 1) % 5)
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def everything(model: nn.Module, optimizers: Optimizers) -> State:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    states = [optim_state_dict(model, each) for each in optimizers]
    optim = {
        "state": {n: v for each in states for n, v in each["state"].items()},
        "param_groups": [g for each in states for g in each["param_groups"]],
    }
    return {"model": values, "optim": optim}


def name_of(world_size: int) -> str:
    return f"of-{world_size}-ranks"


def save_one(world: World, folder: Path) -> None:
    """Train and save on all ranks; rank 0 also writes the values, by torch alone."""
    model = make(seed=1)
    optimizers = optimizers_of(model)
    train(model, optimizers)
    torch.manual_seed(world.rank)
    save(folder, model, optimizers, EXTRA)
    values = {**everything(model, optimizers), "drawn": torch.rand(3)}
    if world.rank == 0:
        torch.save(values, folder.with_suffix(".pt"))


def load_all(
    world: World, options: list[State], *, trained: bool, sharded: bool = True
) -> list[tuple[str, State]]:
    """Load each checkpoint; all that model and optimizers then hold, after its name."""
    found = []
    for each in options:
        for world_size in WORLD_SIZES:
            model = make(seed=2, sharded=sharded, **each)
            optimizers = optimizers_of(model)
            if trained:
                train(model, optimizers)
            name = name_of(world_size)
            if sharded:
                torch.manual_seed(99)
            extra = load(
                FOLDER / name, model, optimizers, options=LoadOptions(rng=sharded)
            )
            state = {**everything(model, optimizers), "extra": extra}
            if sharded and world.rank == 0:
                state["drawn"] = torch.rand(3)
            found.append((name, state))
    return found
