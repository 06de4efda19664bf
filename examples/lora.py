"""Fine-tune a Llama with adapters of PEFT (LoRA), merge them, and generate text.

    torchrun --standalone --nproc-per-node 2 examples/lora.py

The base model is frozen and the adapters are trained; both are sharded. The adapter is
saved as PEFT saves it, merged into the base model unit by unit, and the merged model is
written as a model of transformers.
"""

# example: --steps 60
# quick: --steps 4
# needs: transformers, peft

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_model import CONTEXT, Manual, tiny_llama, tokenizer
from lm_world import World, joined_world
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from composable_fsdp import clip_grad_norm_
from composable_fsdp.hugging_face import HFSharding, merge_adapters, save_pretrained


def adapted(world: World) -> Any:
    """Return the sharded model with adapters beside all linear layers of the blocks."""
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama().to(world.device), adapters)
    # A unit per layer; ``generate`` of a PeftModel works, too.
    return HFSharding().shard(model)


def train(model: Any, steps: int, world: World) -> tuple[float, float]:
    """Train the adapters; return the mean loss of the first and of the last step."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    data = Manual()
    sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(
        data, world.size, world.rank, seed=0
    )
    batches = iter(DataLoader(data, batch_size=16, sampler=sampler))
    losses = []
    for _ in range(steps):
        batch = {key: value.to(world.device) for key, value in next(batches).items()}
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.mean(loss.item()))
    return losses[0], losses[-1]


def run(steps: int, folder: Path, world: World) -> bool:
    """Train, save, merge; return whether the loss fell and the files are right."""
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    dist.barrier()
    model = adapted(world)
    first, last = train(model, steps, world)
    world.say(f"loss {first:.4f}, after {steps} steps {last:.4f}")

    model.eval()
    words = tokenizer()("The ", return_tensors="pt", add_special_tokens=False)
    prompt = words.input_ids.to(world.device)
    # Ranks that may end at different lengths go on with forwards until all are done.
    made = model.generate(
        input_ids=prompt, max_new_tokens=24, do_sample=False, synced_gpus=True
    )
    world.say(f"generated: {tokenizer().decode(made[0])!r}")
    probe = Manual(held_out=True)[0]["input_ids"][None, :CONTEXT].to(world.device)
    with torch.no_grad():
        expected = model(input_ids=probe).logits.cpu()

    save_pretrained(model, folder / "adapter")
    merge_adapters(model)
    save_pretrained(model, folder / "merged", merged=True)
    plain = AutoModelForCausalLM.from_pretrained(folder / "merged")
    with torch.no_grad():
        difference = float((plain(probe.cpu()).logits - expected).abs().max())
    size = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
    world.say(f"adapter: {size:,} bytes; merged model differs by {difference:.1e}")
    return last < first and difference < 1e-3


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Train adapters of a sharded Llama.")
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("demo_out/lora"))
    arguments = parser.parse_args()
    with joined_world() as world:
        return 0 if run(arguments.steps, arguments.folder, world) else 1


if __name__ == "__main__":
    sys.exit(main())
