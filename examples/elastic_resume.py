"""Train, die in the middle of a save, and go on with another number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/elastic_resume.py --die-in-save 40
    torchrun --standalone --nproc-per-node 3 examples/elastic_resume.py

The first run is killed (kill -9 of the last rank) while it saves the checkpoint of
step 40; that of step 20 is whole, and the second run goes on from there. With
``--max-restarts 1`` torchrun does so by itself. The batches are a function of the step
alone, so the losses are those of a run that nobody broke: equal at the same number of
ranks, equal but for rounding at another.

SIGTERM and SIGINT (Ctrl-C), on any rank, end the run after the step, with a checkpoint.
"""

# example: --steps 60
# quick: --steps 4 --save-every 2

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from lm_model import GPT, Block, loss_of
from lm_recipe import MAX_NORM, Recipe
from lm_text import Batch, Corpus, load_corpus
from lm_world import World, joined_world

from composable_fsdp import (
    SaveOptions,
    checkpoints,
    clip_grad_norm_,
    fully_shard,
    load,
    save,
)
from composable_fsdp.storage import remove_stale

STOP = threading.Event()
"""Set when this rank was told to end."""
GLOBAL_BATCH = 24
"""Windows of one step over all ranks: 1, 2, 3, 4, 6, 8, 12 or 24 of them."""


def batch_of(corpus: Corpus, recipe: Recipe, step: int, world: World) -> Batch:
    """This rank's share of the step's windows, which do not depend on the ranks."""
    inputs, targets = corpus.batch(
        GLOBAL_BATCH, recipe.context, seed=recipe.seed, step=step, rank=0
    )
    return inputs[world.rank :: world.size], targets[world.rank :: world.size]


def run(arguments: argparse.Namespace, corpus: Corpus, world: World) -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    torch.manual_seed(recipe.seed)
    model = GPT().to(world.device)
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    optimizer = recipe.optimizer(model.parameters())

    folder, begin = arguments.folder, 0
    if checkpoints(folder):
        begin = load(folder, model, optimizer)["step"]
        world.say(f"resumed after step {begin} on {world.size} ranks")
    if world.rank == 0 and folder.exists():
        # What a save that was killed has left; a checkpoint is never among it.
        for path in remove_stale(folder):
            world.say(f"removed {path}")
    for step in range(begin, recipe.steps):
        inputs, targets = batch_of(corpus, recipe, step, world)
        recipe.set_learning_rate(optimizer, step)
        loss = loss_of(model, inputs.to(world.device), targets.to(world.device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        world.say(f"step {step + 1} loss {world.mean(loss.item())!r}")
        # A signal reaches ranks at different times, or a single rank. The ranks agree,
        # so that all leave after the same step, and no rank waits for one that is gone.
        stop = world.highest(STOP.is_set()) > 0
        if stop or (step + 1) % arguments.save_every == 0:
            if step + 1 == arguments.die_in_save:
                die_in_next_save(world)
            save(
                folder / f"step-{step + 1:06d}",
                model,
                optimizer,
                extra={"step": step + 1},
                options=SaveOptions(keep=2),
            )
        if stop:
            world.say(f"stopped after step {step + 1}")
            return


def die_in_next_save(world: World) -> None:
    """Kill the last rank when it opens its file, unless torchrun has restarted it."""

    def watch(event: str, details: tuple[object, ...]) -> None:
        if event == "open" and str(details[0]).endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)

    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if world.rank == world.size - 1 and restarts == "0":
        sys.addaudithook(watch)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT through kill -9 and changes of world size."
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path("demo_out/elastic"), help="(%(default)s)")
    add("--steps", type=int, default=60, help="training steps (%(default)s)")
    add("--save-every", type=int, default=20, help="steps (%(default)s)")
    add("--die-in-save", type=int, metavar="STEP", help="kill -9 in this step's save")
    add("--seed", type=int, default=0, help="of weights and batches")
    return parser.parse_args(arguments)


def main() -> int:
    """Run; return the exit status."""
    arguments = parse()
    for number in (signal.SIGTERM, signal.SIGINT):
        # The handler only sets a flag: it runs in the middle of a step, where this rank
        # could neither save nor leave.
        signal.signal(number, lambda *_: STOP.set())
    with joined_world() as world:
        if GLOBAL_BATCH % world.size:
            world.say(
                f"elastic_resume: {GLOBAL_BATCH} windows a step do not divide over "
                f"{world.size} ranks. Start 1, 2, 3, 4, 6, 8, 12 or 24."
            )
            return 2
        corpus = load_corpus(
            file=None, stdlib=False, windows=world.size, context=Recipe.context
        )
        run(arguments, corpus, world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
