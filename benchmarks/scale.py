"""Planning and setting up Llama-3-405B for 16,384 ranks, on this machine's CPU.

Run from the repository's root:

    python -m benchmarks.scale                   # some ten seconds

The model is on fake tensors: 126 blocks of 3.2 B parameters with their sizes and no
memory. Planned and sharded for 16,384 ranks, unit by unit, then one step. Each is done
with half of the blocks, too, which shows growth, and at world size 8: what a step does
in Python, and what this process keeps, must not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import in_child
from benchmarks.models import Llama, LlamaBlock
from benchmarks.null_group import null_world
from benchmarks.tables import say, say_versions, table
from composable_fsdp import MixedPrecision, ModuleWrapPolicy, fully_shard, plan
from composable_fsdp.testing.memory import fake_tensors

LAYERS = 126
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GOAL_SECONDS = 60


@dataclass(frozen=True)
class Scale:
    """CPU seconds of each part; Python's calls in a later step; memory it keeps.

    ``kept``: bytes of Python objects that plan, units and first step left.
    """

    plan: float
    shard: float
    step: float
    calls: int
    kept: int

    @property
    def set_up(self) -> float:
        """Plan, sharding and first step together."""
        return self.plan + self.shard + self.step


def measure(layers: int, world_size: int, **sizes: int) -> Scale:
    """Plan, shard and step; in a process that did nothing before."""
    with null_world(world_size), fake_tensors():
        _set_up(Llama(layers=1, **sizes), world_size)  # pays for imports
        model = Llama(layers=layers, **sizes)
        gc.collect()
        seconds = _set_up(model, world_size)
        calls = _calls(model)
    with null_world(world_size), fake_tensors():
        model = Llama(layers=layers, **sizes)
        gc.collect()
        tracemalloc.start()
        _set_up(model, world_size)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Scale(*seconds, calls, kept)


def _set_up(model: Llama, world_size: int) -> tuple[float, float, float]:
    times = [time.process_time()]
    policy = ModuleWrapPolicy({LlamaBlock})
    plan(model, world_size=world_size, policy=policy, mixed_precision=LOW).peak()
    times.append(time.process_time())
    for block in model.blocks:
        fully_shard(block, mixed_precision=LOW)
    fully_shard(model, mixed_precision=LOW)
    times.append(time.process_time())
    _step(model)
    times.append(time.process_time())
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def _step(model: nn.Module) -> None:
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    model.zero_grad()


def _calls(model: nn.Module) -> int:
    """Calls that Python can see in a steady step, those of fake tensors left out."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call":
            code = getattr(frame, "f_code").co_filename  # noqa: B009
            calls += "composable_fsdp" in code

    _step(model)
    gc.disable()
    sys.setprofile(count)
    try:
        _step(model)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table with the goals, write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.scale")
    add = parser.add_argument
    add("--layers", type=int, default=LAYERS, help=f"blocks of the model ({LAYERS})")
    add("--world", type=int, default=16384, help="ranks (16384)")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    layers, world = options.layers, options.world
    say_versions()
    cells = [(layers, world), (layers // 2, world), (layers, 8)]
    found = {
        cell: in_child(lambda cell=cell: measure(*cell))  # type: ignore[misc]  # no loop
        for cell in cells
    }
    table(
        f"Llama-3-405B: CPU seconds (goal: set-up under {GOAL_SECONDS} s), Python calls "
        "of ours in a step, bytes of Python objects kept per unit",
        ("", "plan", "shard", "first step", "set-up", "calls", "KiB per unit"),
        [
            (
                f"{n} blocks, {ranks} ranks",
                *(f"{x:.2f}" for x in (row.plan, row.shard, row.step, row.set_up)),
                str(row.calls),
                f"{row.kept / 1024 / (n + 1):.1f}",
            )
            for (n, ranks), row in found.items()
        ],
    )
    same = found[cells[0]].calls == found[cells[2]].calls
    say(f"calls at 8 ranks are {'the same' if same else 'NOT THE SAME'} (goal: same)")
    if options.json:
        rows = {f"{n} blocks, {w} ranks": asdict(r) for (n, w), r in found.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
