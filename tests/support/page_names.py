"""The names that code blocks of the documentation use without defining them.

``docs/how_to/index.md`` describes them to readers: a model with ``embed``, ``blocks``,
``norm`` and ``head``, batches, and a loss. Modules and the names of the package are not
among them: each page shows its imports.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable_fsdp
from composable_fsdp import ModuleWrapPolicy, fully_shard

VOCABULARY, WIDTH, LENGTH = 16, 8, 8


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + cast(Tensor, self.mlp(self.norm(x)))


class Net(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token's successor."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def generate(self, tokens: Tensor, number: int) -> Tensor:
        """Append the likeliest tokens."""
        for _ in range(number):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross entropy of the next tokens."""
    logits = model(batch[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def sharded() -> Net:
    """Return a sharded model."""
    return fully_shard(Net(), policy=ModuleWrapPolicy({Block}))


def prelude_names() -> dict[str, Any]:
    """Return what code that runs before a block, unseen by readers, may use."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "nn": nn}
    return names | {n: getattr(composable_fsdp, n) for n in composable_fsdp.__all__}


def page_names(*, alone: bool = False) -> dict[str, Any]:
    """Return the names of a page."""
    dataset = [torch.arange(i, i + LENGTH) % VOCABULARY for i in range(8)]
    loader = [torch.stack(dataset[i : i + 2]) for i in range(0, 8, 2)]
    names: dict[str, Any] = {"Block": Block, "build_model": Net, "loss_of": loss_of}
    names.update(dataset=dataset, loader=loader, batch=loader[0])
    if not alone:
        model = sharded()
        names.update(model=model, head=model.head, block=model.blocks[0])
        optimizer = torch.optim.AdamW(model.parameters())
        names.update(optimizer=optimizer, optim=optimizer, sharded_model=sharded)

        def train_step(step: int) -> None:
            torch.autograd.backward(loss_of(model, loader[step % 4]))
            optimizer.step()
            optimizer.zero_grad()

        names.update(train_step=train_step)
    return names
