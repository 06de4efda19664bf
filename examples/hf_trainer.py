"""Train a Llama with the Trainer of transformers, and resume on the checkpoint.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

``ShardedTrainer`` stands in the place of ``Trainer``; all other lines are those of a
script without sharding. The program trains, saves, evaluates and loads the best model.
Then a new trainer goes on from the first checkpoint, and must end with the same model.
"""

# example: --steps 40
# quick: --steps 4
# needs: transformers, accelerate

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_model import Manual, tiny_llama, tokenizer
from lm_world import World, joined_world
from transformers import TrainingArguments

from composable_fsdp import unshard_params
from composable_fsdp.hugging_face.trainer import ShardedTrainer


def trainer_of(folder: Path, steps: int, world: World) -> ShardedTrainer:
    """Return a trainer of a new model; 16 pieces a step, over all ranks."""
    half = max(1, steps // 2)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=max(1, 16 // world.size),
        max_steps=steps,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=half,
        save_steps=half,
        logging_steps=max(1, steps // 4),
        load_best_model_at_end=True,
        use_cpu=world.device.type == "cpu",
        bf16=world.device.type == "cuda",
        report_to=[],
        disable_tqdm=True,
    )
    return ShardedTrainer(
        tiny_llama(),
        arguments,
        train_dataset=Manual(),
        eval_dataset=Manual(held_out=True),
        processing_class=tokenizer(),
    )


def run(steps: int, folder: Path, world: World) -> bool:
    """Train, resume; return whether both models agree and have learned."""
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    dist.barrier()
    trainer = trainer_of(folder, steps, world)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    world.say(f"held-out loss {before:.4f} before, {after:.4f} after {steps} steps")

    again = trainer_of(folder, steps, world)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}"))
    with unshard_params(trainer.model), unshard_params(again.model):
        pairs = zip(trainer.model.parameters(), again.model.parameters(), strict=True)
        same = all(torch.equal(one, other) for one, other in pairs)
    world.say(
        f"resumed from step {steps // 2}: {'the same model' if same else 'DIFFERS'}"
    )
    return same and after < before


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Train with transformers' Trainer.")
    parser.add_argument("--steps", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("demo_out/hf_trainer"))
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, arguments.folder, world) else 1


if __name__ == "__main__":
    sys.exit(main())
