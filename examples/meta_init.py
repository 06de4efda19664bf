"""Build a model without memory, shard it, then give each rank the values of its shard.

    torchrun --standalone --nproc-per-node 2 examples/meta_init.py

The program does this twice: with values from the initialization of the modules, and
with values from safetensors files, of which each rank reads its own slices. No rank
ever holds the whole model. The two models must have the same loss.
"""

# example: --steps 20
# quick: --steps 2

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from lm_model import GPT, Block, loss_of
from lm_recipe import MAX_NORM, Recipe
from lm_text import load_corpus
from lm_world import World, joined_world
from torch import nn

from composable_fsdp import ModuleWrapPolicy, clip_grad_norm_, fully_shard, load
from composable_fsdp.storage import export_safetensors

Initialize = Callable[[nn.Module], None]


def sharded_model(initialize: Initialize | None) -> GPT:
    """Return the sharded model, on the meta device without ``initialize``."""
    with torch.device("meta"):
        model = GPT()
    policy = ModuleWrapPolicy({Block})
    return fully_shard(model, policy=policy, param_init_fn=initialize)


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's shards; tensors on meta have none."""
    held = (p for p in model.parameters() if not p.is_meta)
    return sum(p.numel() * p.element_size() for p in held)


def run(steps: int, folder: Path, world: World) -> bool:
    """Initialize, export, load, train; return whether both models agree and learn."""
    recipe = Recipe(steps=steps, seed=0)
    corpus = load_corpus(
        file=None, stdlib=False, windows=world.size, context=recipe.context
    )
    inputs, targets = corpus.batch(16, recipe.context, seed=1, step=0, rank=world.rank)
    batch = inputs.to(world.device), targets.to(world.device)

    def initialize(module: nn.Module) -> None:
        # Called for each module with parameters, unit by unit.
        module.to_empty(device=world.device, recurse=False)
        cast(nn.Linear, module).reset_parameters()

    torch.manual_seed(recipe.seed)  # the same values on every rank
    model = sharded_model(initialize)
    with torch.no_grad():
        expected = world.mean(loss_of(model, *batch).item())
    whole = 4 * sum(p.numel() for p in GPT().parameters())
    world.say(f"initialized: {held_bytes(model):,} of {whole:,} bytes on rank 0")

    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    dist.barrier()
    export_safetensors(folder, model)
    loaded = sharded_model(None)
    world.say(f"on meta: {held_bytes(loaded):,} bytes of parameters on rank 0")
    loaded.to_empty(device=world.device)  # memory for the shards alone
    load(folder, loaded)
    with torch.no_grad():
        found = world.mean(loss_of(loaded, *batch).item())
    world.say(f"loaded from {folder}: loss {found:.4f}, initialized: {expected:.4f}")

    optimizer = recipe.optimizer(loaded.parameters())  # made when values are there
    last = found
    for step in range(steps):
        recipe.set_learning_rate(optimizer, step)
        loss = loss_of(loaded, *batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
        clip_grad_norm_(loaded, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        last = world.mean(loss.item())
    world.say(f"after {steps} steps on one batch: loss {last:.4f}")
    return found == expected and last <= found


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Initialize on the meta device.")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("demo_out/meta_init"))
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, arguments.folder, world) else 1


if __name__ == "__main__":
    sys.exit(main())
