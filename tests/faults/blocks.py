"""A model of equal blocks, for tests in which a rank goes its own way."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import ShardingStrategy, fully_shard
from tests.support.scripts import launch

train_faulty = partial(
    launch, str(Path(__file__).with_name("faulty_training.py")), limit=25.0
)
"""Start ranks of ``faulty_training``."""
SOON = 15.0
"""Seconds within which every rank has its error."""


class Blocks(nn.Module):
    """Three equal blocks, of which ``route`` says the order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.route = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 4)`` to the same."""
        for index in self.route:
            x = torch.tanh(self.blocks[index](x))
        return x


def sharded(strategy: str = "FULL_SHARD") -> Blocks:
    """A root and three units below, over two replicas for a hybrid strategy."""
    model, mesh = Blocks(), None
    if strategy in ("HYBRID_SHARD", "HFSDP"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.blocks, model):
        fully_shard(module, strategy=ShardingStrategy[strategy], device_mesh=mesh)
    return model


def steps_of(model: Blocks, number: int = 1) -> None:
    """Run forwards and backwards."""
    for _ in range(number):
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
