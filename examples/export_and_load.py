"""Write a sharded Llama as files of transformers, and read them in two ways.

    torchrun --standalone --nproc-per-node 2 examples/export_and_load.py

``save_pretrained`` gathers a unit at a time. ``from_pretrained`` of transformers reads
the files into a plain model; ``load_pretrained`` into a sharded model that was built
without memory, each rank its part. All three must have the same loss.
"""

# example: --steps 20
# quick: --steps 2
# needs: transformers

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_model import Manual, config, tiny_llama, tokenizer
from lm_world import World, joined_world
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from composable_fsdp import clip_grad_norm_, fully_shard
from composable_fsdp.hugging_face import (
    NoSplitPolicy,
    load_pretrained,
    save_pretrained,
)


def run(steps: int, folder: Path, world: World) -> bool:
    """Train, write, read; return whether all models have the same loss."""
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    dist.barrier()
    model: Any = fully_shard(tiny_llama().to(world.device), policy=NoSplitPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Manual()
    for step in range(steps):
        rows = [data[(step * world.size + world.rank) * 8 + at] for at in range(8)]
        ids = torch.stack([row["input_ids"] for row in rows]).to(world.device)
        model(input_ids=ids, labels=ids).loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    save_pretrained(model, folder, max_shard_size="300KB")
    if world.rank == 0:
        tokenizer().save_pretrained(folder)
    dist.barrier()
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    world.say(f"wrote {len(files)} files of weights to {folder}")

    plain = AutoModelForCausalLM.from_pretrained(folder).to(world.device)
    with torch.device("meta"):  # no memory on any rank
        empty = LlamaForCausalLM(config())
    loaded: Any = fully_shard(empty, policy=NoSplitPolicy(), device_id=world.device)
    load_pretrained(loaded, folder)

    probe = torch.stack([data[at]["input_ids"] for at in range(4)]).to(world.device)
    with torch.no_grad():
        losses = [float(m(probe, labels=probe).loss) for m in (model, plain, loaded)]
    names = "trained {:.6f}, from_pretrained {:.6f}, load_pretrained {:.6f}"
    world.say(names.format(*losses))
    return max(losses) - min(losses) < 1e-5


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Export to safetensors and load.")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("demo_out/exported"))
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, arguments.folder, world) else 1


if __name__ == "__main__":
    sys.exit(main())
