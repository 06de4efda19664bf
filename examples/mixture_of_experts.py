"""Train a mixture of experts: each expert is a unit, and every rank runs every expert.

    torchrun --standalone --nproc-per-node 2 examples/mixture_of_experts.py

A router sends each byte to one of four experts. On some rank an expert may get no bytes
at all. Each unit is a collective, so a rank that skipped the expert would leave the
others waiting. The layer therefore calls each expert, at times with an empty batch.

An expert is gathered alone, so only one expert of a layer is whole at a time.
"""

# example: --steps 60
# quick: --steps 3

from __future__ import annotations

import argparse
import sys
from typing import cast

import torch
from lm_recipe import MAX_NORM, Recipe
from lm_text import VOCABULARY, load_corpus
from lm_world import World, joined_world
from torch import Tensor, nn
from torch.nn import functional as F

from composable_fsdp import clip_grad_norm_, describe, fully_shard

WIDTH, EXPERTS, LAYERS = 64, 4, 2
BALANCE = 0.01
"""Weight of the term that asks for equal numbers of bytes per expert."""


class Expert(nn.Module):
    """A two-layer network for the bytes that the router sends."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(bytes, WIDTH)`` to the same; there may be no bytes."""
        return cast(Tensor, self.down(F.gelu(self.up(x))))


class Mixture(nn.Module):
    """A router and its experts, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the term for balance, and the bytes of each expert."""
        flat = self.norm(x).flatten(0, 1)
        gates = self.router(flat).softmax(-1)
        weight, choice = gates.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            # No `if len(rows)`: a rank without bytes for the expert calls it, too.
            rows = (choice == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        load = torch.bincount(choice, minlength=EXPERTS)
        balance = EXPERTS * (load / len(flat) * gates.mean(0)).sum()
        return x + out.view_as(x), balance, load


class Model(nn.Module):
    """The next byte from the three bytes before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Mixture() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, the term for balance, and loads ``(LAYERS, EXPERTS)``."""
        x = sum(
            embed(inputs.roll(back, dims=1)) for back, embed in enumerate(self.bytes)
        )
        balance, loads = torch.zeros((), device=inputs.device), []
        for layer in self.layers:
            x, term, load = layer(x)
            balance = balance + term
            loads.append(load)
        return self.head(x), balance, torch.stack(loads)


def run(steps: int, world: World) -> bool:
    """Train; return whether the model has learned."""
    recipe = Recipe(steps=steps, seed=0)
    corpus = load_corpus(
        file=None, stdlib=False, windows=world.size, context=recipe.context
    )
    torch.manual_seed(recipe.seed)
    model = Model().to(world.device)
    for layer in model.layers:
        for expert in cast(Mixture, layer).experts:
            fully_shard(expert)
        fully_shard(layer)
    fully_shard(model)
    optimizer = recipe.optimizer(model.parameters())
    world.say(f"{describe(model)}\n")

    first = last = 0.0
    for step in range(steps):
        inputs, targets = corpus.batch(
            recipe.batch, recipe.context, seed=0, step=step, rank=world.rank
        )
        recipe.set_learning_rate(optimizer, step)
        logits, balance, loads = model(inputs.to(world.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(world.device).flatten())
        total = loss + BALANCE * balance
        total.backward()
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        last = world.mean(loss.item())
        first = first or last
        if (step + 1) % 10 == 0 or step + 1 == steps:
            world.say(
                f"step {step + 1:3}  loss {last:.3f}  bytes per expert on rank 0: "
                f"{loads.tolist()}"
            )
    world.say(f"loss {first:.3f} -> {last:.3f} nats a byte")
    return last < first


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Train a mixture of experts.")
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, world) else 1


if __name__ == "__main__":
    sys.exit(main())
