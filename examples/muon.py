"""Train the matrices with Muon, and all other parameters with AdamW.

    torchrun --standalone --nproc-per-node 2 examples/muon.py

Muon orthogonalizes the update of a whole matrix, and each rank holds rows only. The
momentum is element-wise and stays with the rows. ``map_on_owners`` puts each matrix
together on one rank, its owner, and returns the rows of the result. In the end one more
step is compared with ``torch.optim.Muon`` on whole parameters.
"""

# example: --steps 60
# quick: --steps 3

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import torch
from lm_model import GPT
from lm_recipe import MAX_NORM, Recipe
from lm_text import load_corpus
from lm_world import World, joined_world
from torch import Tensor, nn
from torch.nn import functional as F

from composable_fsdp import clip_grad_norm_, fully_shard, get_full_grad, get_full_param
from composable_fsdp.access import full_shape
from composable_fsdp.features import map_on_owners

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the polynomial that moves singular values towards 1 (Keller Jordan et al.)."""


def orthogonalized(update: Tensor, _: Tensor) -> Tensor:
    """Return the nearest (semi-)orthogonal matrix, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    is_tall = update.size(0) > update.size(1)
    x = update.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _step in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon on shards: state and weights stay with the rows of each rank."""

    works_on_shards = True  # the audit of the first step trusts the class

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step; every rank calls, also without rows of some matrices."""
        for group in self.param_groups:
            parameters = group["params"]
            updates = [self._update(p, group["momentum"]) for p in parameters]
            # All matrices in a single call: the exchange of the next unit then runs
            # while the owners compute.
            found = map_on_owners(
                parameters, updates, orthogonalized, dtype=torch.bfloat16
            )
            for p, update in zip(parameters, found, strict=True):
                if update is not None:
                    rows, columns = full_shape(p)
                    rate = group["lr"] * max(1, rows / columns) ** 0.5
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-rate)

    def _update(self, p: Tensor, momentum: float) -> Tensor | None:
        """Return this rank's rows of the update with Nesterov's momentum."""
        if p.grad is None:
            return None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        kept: Tensor = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(kept, momentum)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains a parameter: no embedding, no head, no vector."""
    return parameter.ndim == 2 and name.startswith("blocks.")


def difference_to_torch(model: nn.Module, muon: Muon, names: list[str]) -> float:
    """Take a step; return the largest difference to torch's Muon on whole matrices."""
    parameters = dict(model.named_parameters())
    lr = muon.param_groups[0]["lr"]
    plain = []
    for name in names:
        whole = nn.Parameter(get_full_param(model, name).clone())
        whole.grad = get_full_grad(model, name)
        plain.append(whole)
    theirs = torch.optim.Muon(plain, lr=lr)
    # A first step: torch's optimizer begins with no momentum.
    ours = Muon([parameters[name] for name in names], lr)
    theirs.step()  # type: ignore[no-untyped-call]  # torch's stub lacks types
    ours.step()
    return max(
        (get_full_param(model, name) - whole).abs().max().item()
        for name, whole in zip(names, plain, strict=True)
    )


def run(steps: int, world: World) -> bool:
    """Train; return whether the model has learned, and whether Muon is Muon."""
    recipe = Recipe(steps=steps, seed=0)
    corpus = load_corpus(
        file=None, stdlib=False, windows=world.size, context=recipe.context
    )
    torch.manual_seed(recipe.seed)
    model = GPT().to(world.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    named = list(model.named_parameters())
    matrices = [name for name, p in named if is_hidden_matrix(name, p)]
    muon = Muon([p for name, p in named if name in matrices], lr=0.02)
    adamw = recipe.optimizer([p for name, p in named if name not in matrices])
    world.say(
        f"Muon trains {len(matrices)} matrices, AdamW {len(named) - len(matrices)}"
    )

    first = last = 0.0
    for step in range(steps):
        inputs, targets = corpus.batch(
            recipe.batch, recipe.context, seed=0, step=step, rank=world.rank
        )
        recipe.set_learning_rate(adamw, step)
        logits = model(inputs.to(world.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(world.device).flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
        clip_grad_norm_(model, MAX_NORM)
        last = world.mean(loss.item())
        first = first or last
        if step + 1 < steps:
            muon.step()
            adamw.step()
            model.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == steps:
            world.say(f"step {step + 1:3}  loss {last:.3f}")
    difference = difference_to_torch(model, muon, matrices)
    world.say(f"loss {first:.3f} -> {last:.3f} nats a byte")
    world.say(f"a step beside torch.optim.Muon on whole matrices: {difference:g} apart")
    return last < first and difference == 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Train with Muon and AdamW.")
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, world) else 1


if __name__ == "__main__":
    sys.exit(main())
