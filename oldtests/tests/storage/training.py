"""What the checkpoint tests share: a small model on any path, trained and compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp import optim_state_dict
from tests.support.models import TinyGPT
from tests.support.place import _same
from tests.support.reference import apply_units, backward, gpt_input, loss_of
from tests.support.sharded import UNITS

State = dict[str, Any]


class Saved(nn.Module):
    """A tied GPT with a frozen embedding, a buffer and an empty parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.gpt = TinyGPT(tied_head=True, seed=seed)
        self.gpt.positions.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor([seed, 2, 3]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens)
        return logits * self.scale + self.nothing.sum()


def make(path: str, seed: int = 0, **options: Any) -> nn.Module:
    """The model: ``plain``, or sharded with units of its own for both blocks."""
    model = Saved(seed)
    if path == "plain":
        return model
    units = [f"gpt.{unit}" for unit in UNITS]
    return apply_units(model, units, path=path, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over two groups with options of their own."""
    params = list(model.parameters())
    groups = [
        {"params": params[:5], "lr": 0.05, "weight_decay": 0.1},
        {"params": params[5:], "lr": 0.02, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, eps=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> float:
    """One step on the same tokens on every rank; the loss before it."""
    loss = loss_of(model, gpt_input(at, 0))
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Weights and optimizer state by the plain model's names, full."""
    return {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optim": optim_state_dict(model, optimizer),
    }


def same(left: Any, right: Any) -> bool:
    """Whether nested dicts, lists and tensors are equal bit by bit."""
    return _same(left, right)
