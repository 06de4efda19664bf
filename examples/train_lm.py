"""Train a small language model, sharded over ranks, and check it against the plain one.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --check

A byte-level GPT of a million parameters learns English from the manual that comes with
every Python. Everything that shards is in ``shard`` and ``train``; the other files are
the model (lm_model.py), the text (lm_text.py), the recipe (lm_recipe.py), the ranks
(lm_world.py), the check (lm_check.py) and what is shown (lm_report.py). The exit status
is not zero if the model did not learn, or with ``--check`` if it learned anything else
than the plain one.
"""

# example: --check --steps 80
# quick: --check --steps 2

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from lm_check import CHECKED_STEPS, DEFINITION, TOLERANCE, PlainTraining
from lm_model import GPT, Block, generate, loss_of
from lm_recipe import MAX_NORM, Recipe
from lm_report import Bytes, Curve, bytes_table, progress, save_curve
from lm_text import Corpus, TextError, counting_losses, load_corpus
from lm_world import World, joined_world
from torch import nn

from composable_fsdp import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingPlan,
    clip_grad_norm_,
    fully_shard,
    optim_state_dict,
    plan,
)
from composable_fsdp.features import StepLog

LIMIT = 2.2
"""Held-out nats per byte that the demo must get below."""
EVALUATIONS = 10
STEPS = 350
"""Enough steps for ``LIMIT``."""


def shard(model: nn.Module, *, wrapper: bool) -> nn.Module:
    """Make each block and the rest a unit: by ``fully_shard``, or by the wrapper."""
    if wrapper:
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy)
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


@dataclass(frozen=True)
class Trained:
    """What training leaves: the losses, and this rank's bytes after the last step."""

    curve: Curve
    bytes: Bytes


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    recipe: Recipe,
    world: World,
    check: PlainTraining | None,
) -> Trained:
    """Train the sharded model; its loop is that of a plain one but for the clipping."""
    curve, measured = Curve(), Bytes(0, 0, 0)
    every = max(1, recipe.steps // EVALUATIONS)
    batches = (
        corpus.batch(
            recipe.batch,
            recipe.context,
            seed=recipe.seed,
            step=step,
            rank=world.rank,
        )
        for step in range(recipe.steps)
    )
    with progress(recipe.steps, shown=world.rank == 0) as bar:
        log = StepLog(model, every=every, write=bar.write)
        for step, (inputs, targets) in enumerate(log.timed(batches)):
            recipe.set_learning_rate(optimizer, step)
            loss = loss_of(model, inputs.to(world.device), targets.to(world.device))
            loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
            clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            if step + 1 == recipe.steps:
                measured = Bytes.measured(model, optimizer)
            optimizer.zero_grad()
            curve.train.append(world.mean(loss.item()))
            found = {}
            with log.paused():
                if check is not None and step < CHECKED_STEPS:
                    check.compare(step, loss.item(), model.state_dict())
                if (step + 1) % every == 0 or step + 1 == recipe.steps:
                    found["held_out"] = evaluate(model, corpus, recipe, world)
                    curve.held_out.append((step + 1, found["held_out"]))
            log.step(curve.train[-1], tokens=inputs.numel(), **found)
            bar.update()
    return Trained(curve, measured)


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, recipe: Recipe, world: World) -> float:
    """Mean held-out nats per byte. Collective: each rank computes its part."""
    total, count = 0.0, 0
    for inputs, targets in corpus.held_out_batches(
        recipe.batch, recipe.context, rank=world.rank, world_size=world.size
    ):
        loss = loss_of(model, inputs.to(world.device), targets.to(world.device))
        total += loss.item() * len(inputs)
        count += len(inputs)
    return world.mean(total / count)


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, world: World
) -> None:
    """Write the whole model and optimizer state on rank 0.

    Collective: it gathers them, on all ranks.
    """
    full = {"model": model.state_dict(), "optim": optim_state_dict(model, optimizer)}
    if world.rank == 0:
        torch.save(full, folder / "model_and_optim.pt")
        print(f"saved: {folder / 'model_and_optim.pt'}")


def run(arguments: argparse.Namespace, corpus: Corpus, world: World) -> bool:
    """Plan, shard, train, report; whether the model learned what it should."""
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    torch.manual_seed(recipe.seed)
    model: nn.Module = GPT().to(world.device)
    planned = plan(model, world_size=world.size, policy=ModuleWrapPolicy({Block}))
    unigram, bigram = counting_losses(corpus)
    world.say(_introduction(arguments, corpus, planned, world))
    world.say(f"counting bytes gives {unigram:.2f}, counting pairs {bigram:.2f} nats\n")

    check = None
    if arguments.check:
        check = PlainTraining(
            copy.deepcopy(model),
            corpus,
            recipe,
            rank=world.rank,
            world_size=world.size,
        )
    expected = _expected_bytes(planned, tensors=len(list(model.parameters())))
    whole = _expected_bytes(
        plan(model, world_size=1), tensors=len(list(model.parameters()))
    )
    model = shard(model, wrapper=arguments.wrapper)
    optimizer = recipe.optimizer(model.parameters())
    trained = train(model, optimizer, corpus, recipe, world, check)

    measured: list[Bytes] = [trained.bytes] * world.size
    dist.all_gather_object(measured, trained.bytes)
    sample = generate(
        model,
        b"The ",
        300,
        context=recipe.context,
        device=world.device,
        seed=recipe.seed,
    )
    if arguments.save is not None:
        save(model, optimizer, arguments.save, world)
    world.say(f"\n{sample}\n")
    world.say(f"{bytes_table(expected, measured, whole)}\n")
    if world.rank == 0:
        print(save_curve(trained.curve, arguments.out, bigram=bigram, limit=LIMIT))
    return verdict(trained.curve, check, world)


def _expected_bytes(planned: ShardingPlan, *, tensors: int) -> Bytes:
    """A rank's bytes by the plan; AdamW keeps two moments, and a step per tensor."""
    moments = 2 * planned.parameter_bytes + 4 * tensors
    return Bytes(planned.parameter_bytes, planned.gradient_bytes, moments)


def _introduction(
    arguments: argparse.Namespace, corpus: Corpus, planned: ShardingPlan, world: World
) -> str:
    door = "FullyShardedDataParallel" if arguments.wrapper else "fully_shard"
    alone = "" if "RANK" in os.environ else " (start it with torchrun for more)"
    return (
        f"A byte-level GPT of {planned.numel:,} parameters, sharded by {door} over "
        f"{world.size} {world.device.type} rank{'s' * (world.size > 1)}{alone},\n"
        f"learns {corpus.source}: {len(corpus.train):,} bytes, "
        f"{len(corpus.held_out):,} held out.\n\n{planned}\n"
    )


def verdict(curve: Curve, check: PlainTraining | None, world: World) -> bool:
    """Say what must hold and whether it does; the same answer on every rank."""
    held_out = curve.held_out[-1][1]
    judged = len(curve.train) >= STEPS
    good = held_out < LIMIT or not judged
    aim = f"to be below {LIMIT}" if judged else f"too few steps to ask for {LIMIT}"
    world.say(f"{_mark(good)} held-out loss {held_out:.3f} nats a byte, {aim}")
    if check is not None:
        losses, weights = world.highest(check.losses), world.highest(check.weights)
        same = losses <= TOLERANCE and weights <= TOLERANCE
        world.say(
            f"{_mark(same)} first {len(curve.train[:CHECKED_STEPS])} steps beside the "
            f"unsharded model: losses differ by {losses:.1e},\n"
            f"       weights by {weights:.1e}, to be within {TOLERANCE:.0e}\n"
            f"       ({DEFINITION})"
        )
        good = good and same
    return good


def _mark(good: bool) -> str:
    return "ok    " if good else "FAILED"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT sharded over torchrun's ranks."
    )
    add = parser.add_argument
    add("--check", action="store_true", help="compare with the unsharded model")
    add("--wrapper", action="store_true", help="shard by FullyShardedDataParallel")
    add("--steps", type=_positive, default=STEPS, help="training steps (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and sample")
    add("--text", type=Path, metavar="FILE", help="learn this file")
    add("--stdlib", action="store_true", help="learn the standard library's sources")
    add(
        "--out", type=Path, default=Path("demo_out"), help="for the curve (%(default)s)"
    )
    add("--save", type=Path, metavar="DIR", help="write full model and optimizer state")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expects 1 or more, got {value}")
    return value


def main() -> int:
    """Run the demo; return the exit status."""
    arguments = parse()
    try:
        corpus = load_corpus(
            file=arguments.text,
            stdlib=arguments.stdlib,
            windows=int(os.environ.get("WORLD_SIZE", 1)),
            context=Recipe.context,
        )
        for folder in filter(None, (arguments.out, arguments.save)):
            folder.mkdir(parents=True, exist_ok=True)
    except (TextError, OSError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            what = "--out or --save: " if isinstance(error, OSError) else ""
            print(f"train_lm: {what}{error}", file=sys.stderr)
        return 2
    with joined_world() as world:
        return 0 if run(arguments, corpus, world) else 1


if __name__ == "__main__":
    sys.exit(main())
