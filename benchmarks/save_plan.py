"""What rank 0 does alone in a save of a large job, while all other ranks wait.

    python -m benchmarks.save_plan                       # 70 B parameters, 1,024 ranks
    python -m benchmarks.save_plan --layers 32 --width 4096 --feed 11008 --ranks 128

The parts that the ranks of a Llama-like model with AdamW would send are made from the
plan of a model on meta; nothing is written, and no process is started. Seconds are CPU
seconds of one core:

    plan        on each rank alone: which elements it writes, without a message
    receive     unpickle the descriptions of all ranks, as the gather does
    manifest    merge and check; JSON

The plan of 405 B parameters on 4,096 ranks (``--saves 0``: nothing of rank 0)::

    --layers 126 --width 16384 --feed 53248 --ranks 4096 --saves 0
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.tables import fixed, say_versions, table
from composable_fsdp import CustomPolicy, plan
from composable_fsdp.naming import join_name
from composable_fsdp.storage.manifest import File, Span, block_size
from composable_fsdp.storage.merge import FilePart, TensorPart, merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.values import encode
from composable_fsdp.tools.sharding_plan import ShardingPlan

Result = TypeVar("Result")
STATES = ("exp_avg", "exp_avg_sq")


class Layer(nn.Module):
    """The parameters of a block of Llama with grouped queries."""

    def __init__(self, width: int, feed: int, keys: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.up, self.gate = (nn.Linear(width, feed, bias=False) for _ in range(2))
        self.down = nn.Linear(feed, width, bias=False)


def on_meta(options: argparse.Namespace) -> nn.Module:
    """The model without memory."""
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(
            Layer(options.width, options.feed, options.width // 8)
            for _ in range(options.layers)
        )
        model.embedding = nn.Embedding(128_256, options.width)
        model.head = nn.Linear(options.width, 128_256, bias=False)
    return model


def part_of(found: ShardingPlan, rank: int, at: int) -> FilePart:
    """The part of ``rank`` in the save after step ``at``."""
    part, number = FilePart(), 0
    names = []
    for unit in found.units:
        for layout in unit.regions:
            for slot in layout.parameters:
                names.append(join_name(unit.fqn, slot.fqn))
                start, stop = layout.interval(slot, rank)
                number += 1
                # A rank without elements tells nothing.
                if start < stop:
                    made = _tensor(names[-1], layout.dtype, slot.shape, (start, stop))
                    made.number = number
                    part.tensors.append(made)
    for made in part.tensors:
        step = encode(torch.tensor(float(at)), "step", no_tensor, python_values=True)
        if not made.is_whole:
            made.shared["step"] = json.dumps(step)
        if not made.span.start:
            made.values["step"] = step
    if not rank:
        part.param_groups = {0: {"lr": 1e-4 / (at + 1), "params": names}}
        part.extra = {"step": at}
    # As ``rng_state``: two loose tensors.
    for key, numel in (("torch", 5056), ("others", 7000)):
        part.loose[f"loose.{len(part.loose)}"] = torch.uint8, (numel,)
        part.rng = {**(part.rng or {"cuda": []}), key: {"$tensor": len(part.loose) - 1}}
    return part


def _tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], span: tuple[int, int]
) -> TensorPart:
    """A rank's part of a parameter with AdamW's state."""
    part = TensorPart((name,), dtype, shape, Span(*span), 0)
    part.states = dict.fromkeys(STATES, dtype)
    return part


def no_tensor(tensor: torch.Tensor, where: str) -> int:
    """For ``encode``: a number of steps is stored as a number."""
    raise AssertionError(where)


def file_of(part: FilePart, rank: int, block: int, at: int) -> tuple[File, Any]:
    """The file that a rank would have written, and the places of its entries."""
    entries = [
        (each.key(state), each.dtype, each.span.numel)
        for each in part.tensors
        for state in (None, *each.states)
    ]
    entries += [(key, dtype, shape[0]) for key, (dtype, shape) in part.loose.items()]
    begins, end = {}, 0
    # Larger elements first, as in a file.
    for key, dtype, numel in sorted(entries, key=lambda entry: -entry[1].itemsize):
        begins[key] = end
        end += dtype.itemsize * numel
    crcs = tuple((at * 7919 + rank + i) % 2**32 for i in range(-(-end // block)))
    header = 64 * (1 + len(entries))
    return File(f"rank{rank:05d}.safetensors", header, 1, end, crcs), begins


def timed(act: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds of ``act``, and its result."""
    gc.collect()
    begin = time.process_time()
    found = act()
    return time.process_time() - begin, found


def _manifest(told: list[Any], block: int) -> bytes:
    """Merge and check the parts; the content of the manifest's file."""
    return manifest_bytes(merge(told, block), "checkpoint")


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate a few saves and print a row for each."""
    parser = argparse.ArgumentParser(prog="benchmarks.save_plan")
    add = parser.add_argument
    add("--layers", type=int, default=80, help="(80)")
    add("--width", type=int, default=8192, help="(8192)")
    add("--feed", type=int, default=28_672, help="width of the feed-forward (28672)")
    add("--ranks", type=int, default=1024, help="(1024)")
    add("--saves", type=int, default=2, help="(2)")
    options = parser.parse_args(arguments)
    say_versions()
    policy = CustomPolicy(lambda module: isinstance(module, Layer))
    model = on_meta(options)
    layouts = partial(plan, model, world_size=options.ranks, policy=policy)
    layout, found = timed(layouts)
    plans = [timed(partial(part_of, found, r, 0))[0] for r in (0, options.ranks // 2)]
    tracemalloc.start()
    again = layouts()
    peaks = [tracemalloc.get_traced_memory()[1] / 1e6]
    begin_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    held = part_of(again, options.ranks // 2, 0)
    peaks.append((tracemalloc.get_traced_memory()[1] - begin_bytes) / 1e6)
    tracemalloc.stop()
    size = len(pickle.dumps(held)) / 1e3
    table(
        f"{found.numel / 1e9:.1f} B parameters, {len(found.units)} units, AdamW, "
        f"{options.ranks} ranks: what each rank does alone, without a message",
        ("", "s of all layouts", "MB", "s of the plan", "MB", "kB told"),
        [("a rank", *fixed((layout, peaks[0], max(plans), peaks[1], size), 3))],
    )
    if not options.saves:
        return 0
    nbytes = sum(
        3 * r.padded_numel * r.dtype.itemsize for u in found.units for r in u.regions
    )
    block = block_size(nbytes)
    rows = []
    for at in range(options.saves):
        told = []
        for rank in range(options.ranks):
            part = part_of(found, rank, at)
            told.append(pickle.dumps((part, *file_of(part, rank, block, at))))
        values: list[Any]
        received, values = timed(partial(list, map(pickle.loads, told)))
        made, data = timed(partial(_manifest, values, block))
        sent = sum(map(len, told)) / 1e6
        cells = fixed((sent, received, made, received + made, len(data) / 1e6), 2)
        rows.append((f"save {at + 1}", *cells))
    table(
        f"{found.numel / 1e9:.1f} B parameters, {len(found.units)} units, AdamW, "
        f"{options.ranks} ranks: seconds of rank 0 alone, megabytes",
        ("", "MB told", "receive", "manifest", "sum", "MB of JSON"),
        rows,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
