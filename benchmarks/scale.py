"""Planning and setting up Llama-3-405B for 16,384 ranks, on this machine's CPU.

Run from the repository's root:

    python -m benchmarks.scale                   # some ten seconds

The model is on fake tensors: 126 blocks of 3.2 B parameters with their sizes and no
memory. Planned and sharded for 16,384 ranks, unit by unit, then one step; with half of
the blocks, too, which shows growth. What a step does in Python must not depend on the
number of ranks: with ``Block.ELEMENT``, which gives a unit the same one region at any
number, the calls at 8 and at 16,384 are compared (row blocks make one to three).
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
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.measure import in_child
from benchmarks.models import Llama, LlamaBlock
from benchmarks.null_group import null_world
from benchmarks.tables import say, say_versions, table
from composable_fsdp import (
    Block,
    MixedPrecision,
    ModuleWrapPolicy,
    audit,
    fully_shard,
    plan,
)
from tests.support.memory import fake_tensors

LAYERS = 126
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GOAL_SECONDS = 60


@dataclass(frozen=True)
class Scale:
    """CPU seconds of each part, and bytes of Python objects that are kept after it."""

    plan: float
    shard: float
    step: float
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
    with null_world(world_size), fake_tensors():
        model = Llama(layers=layers, **sizes)
        gc.collect()
        tracemalloc.start()
        _set_up(model, world_size)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Scale(*seconds, kept)


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


def calls_of_a_step(layers: int, world_size: int, **sizes: int) -> tuple[int, int]:
    """Python's calls of ours in a steady step, and the buffers that it gives memory."""
    with null_world(world_size), fake_tensors():
        model = Llama(layers=layers, **sizes)
        for unit in (*model.blocks, model):
            fully_shard(unit, mixed_precision=LOW, block=Block.ELEMENT)
        # No optimizer steps, whose first step would end the audit.
        audit(model, "off")
        _step(model)
        resized = 0
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> object:
            nonlocal resized
            resized += nbytes > 0
            return plain(storage, nbytes)

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            _step(model)
        return _calls(model), resized


def _calls(model: nn.Module) -> int:
    """Calls of functions of this package in a step."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call":
            code = getattr(frame, "f_code").co_filename  # noqa: B009
            calls += "composable_fsdp" in code

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
    cells = [(layers, world), (layers // 2, world)]
    found = {cell: in_child(partial(measure, *cell)) for cell in cells}
    table(
        f"Llama-3-405B: CPU seconds (goal: set-up under {GOAL_SECONDS} s), and "
        "memory of Python objects that is kept per unit (goal: constant)",
        ("", "plan", "shard", "first step", "set-up", "KiB per unit"),
        [
            (
                f"{n} blocks, {ranks} ranks",
                *(f"{x:.2f}" for x in (row.plan, row.shard, row.step, row.set_up)),
                f"{row.kept / 1024 / (n + 1):.1f}",
            )
            for (n, ranks), row in found.items()
        ],
    )
    few, many = (in_child(partial(calls_of_a_step, 4, n)) for n in (8, world))
    say(
        f"a step of 4 blocks: {few[0]} calls and {few[1]} allocations of ours at 8 "
        f"ranks, {many[0]} and {many[1]} at {world} (goal: the same)"
    )
    if options.json:
        rows = {f"{n} blocks, {w} ranks": asdict(r) for (n, w), r in found.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
