"""A checkpoint of tensor parallelism and of a wrapped tensor, written once.

A matrix whose columns tensor parallelism cuts, with moments, in a unit; and a tensor
that wraps another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable_fsdp import (
    fully_shard,
    get_full_param,
    load,
    optim_state_dict,
    save,
)
from tests.goldens.checkpoints import FOLDER, State
from tests.goldens.model import sines
from tests.storage.test_wrappers import Half
from tests.support.world import World

NAME = "cut-of-4-ranks"


class Model(nn.Module):
    """A matrix, a row, and a buffer that wraps another tensor."""

    def __init__(self, seed: int, dp: int) -> None:
        super().__init__()
        self.down = nn.Parameter(sines(torch.Size([4, 7]), seed))
        self.bias = nn.Parameter(sines(torch.Size([5]), seed + 1))
        self.register_buffer("table", Half(sines(torch.Size([3]), seed + 2)))
        if dp:
            mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
            cut = distribute_tensor(self.down.detach(), mesh["tp"], [Shard(1)])
            self.down = nn.Parameter(cut)
            fully_shard(self, device_mesh=mesh["dp"])


def make(seed: int, dp: int) -> tuple[Model, optim.Optimizer]:
    """Return the model over ``dp`` data ranks, or plain (0), and AdamW after a step."""
    model = Model(seed, dp)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return model, optimizer


def save_one(world: World, folder: Path) -> None:
    """Save on all ranks; the first also writes the plain model's values by torch."""
    save(folder, *make(1, 2))
    if world.rank == 0:
        torch.save(everything(*make(1, 0), 0), folder.parent / f"{NAME}.pt")


def everything(model: nn.Module, optimizer: optim.Optimizer, dp: int) -> State:
    """Return whole values and states, by name."""
    if dp:
        states = optim_state_dict(model, optimizer)["state"]
        values = {name: get_full_param(model, name) for name in ("down", "bias")}
    else:
        named = dict(model.named_parameters())
        states = {name: optimizer.state[param] for name, param in named.items()}
        values = {name: param.detach().clone() for name, param in named.items()}
    table: Any = dict(model.named_buffers())["table"]
    stored: Tensor = table.stored
    return {"values": {**values, "table": stored}, "state": states}


def load_one(world: World, dp: int) -> State:
    """Load the checkpoint over ``dp`` data ranks; return all whole."""
    model, optimizer = make(2, dp)
    load(FOLDER / NAME, model, optimizer)
    return everything(model, optimizer, dp)
