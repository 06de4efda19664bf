"""A checkpoint with values and tensors of single ranks, written once.

And with a parameter without the others of its region, and the types of ``extra``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from composable_fsdp import LoadOptions, SaveOptions, fully_shard, load, save
from tests.goldens.checkpoints import FOLDER, State
from tests.goldens.model import sines
from tests.support.world import World

NAME = "own-of-2-ranks"
LEFT_OUT = "body.bias"
EXTRA: dict[str, Any] = {
    "tuple": (1, (2.5, b"\x00\xff")),
    "milestones": {30: 1, 80: 2},
    "by step": {1: "a", None: b"b"},
}


class Model(nn.Module):
    """A sharded layer, and an expert that each rank has for itself."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.expert = nn.Linear(5, 2 + rank)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(sines(param.shape, i + seed + 10 * rank * (i > 1)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.expert(torch.tanh(self.body(x))))


def make(rank: int, seed: int) -> tuple[Any, optim.Optimizer]:
    """Return the model and AdamW, after a step with equal gradients on all ranks."""
    model = Model(rank, seed)
    fully_shard(model, ignored_states=list(model.expert.parameters()))
    groups: list[State] = [
        {"params": list(model.body.parameters())},
        {"params": list(model.expert.parameters()), "lr": 0.1 * (rank + 1)},
    ]
    optimizer = optim.AdamW(groups, lr=0.01)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: optim.Optimizer) -> State:
    """Return this rank's parts of all that is saved, by name."""
    names = [name for name, _ in Model(0, 0).named_parameters()]
    params = dict(zip(names, model.parameters(), strict=True))
    del params[LEFT_OUT]
    return {
        "values": {name: param.detach().clone() for name, param in params.items()},
        "state": {name: dict(optimizer.state[param]) for name, param in params.items()},
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def save_one(world: World, folder: Path) -> None:
    """Save on both ranks; each also writes its values by torch alone."""
    model, optimizer = make(world.rank, 1)
    save(
        folder,
        model,
        optimizer,
        EXTRA,
        options=SaveOptions(
            per_rank={"at": (world.rank, "b")}, exclude=LEFT_OUT, local="expert"
        ),
    )
    torch.save(everything(model, optimizer), file_of(world.rank, folder.parent))


def file_of(rank: int, folder: Path = FOLDER) -> Path:
    return folder / f"{NAME}.rank{rank}.pt"


def load_one(world: World) -> tuple[State, Any, State]:
    """Load the checkpoint; what this rank then holds, ``extra`` and its own values."""
    model, optimizer = make(world.rank, 2)
    own: State = {}
    # Ranks that did not save would keep an expert of their own.
    options: State = {"per_rank": own} if world.world_size == 2 else {"local": "expert"}
    extra = load(
        FOLDER / NAME,
        model,
        optimizer,
        options=LoadOptions(exclude=LEFT_OUT, **options),
    )
    return everything(model, optimizer), extra, own
