"""The comparison of models before the first gather: what ranks pay for it, once.

    python -m benchmarks.fingerprint                  # 1,000 units, 1 GiB of values

The comparison itself reads names, shapes and options of all units; its cost is shown
as a part of set-up without it. The hash of the weights reads every byte while the rank
shards the model, and stands by itself, for large tensors in GiB/s and for the small
ones of the benchmark's model as a part of set-up. ``check_weights="off"`` leaves the
hash out. The exchange of 64 bytes costs what a small all-gather costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.measure import cpu_seconds, in_child
from benchmarks.null_group import null_world
from benchmarks.tables import fixed, say_versions, table
from benchmarks.variants import TinyModel
from composable_fsdp import fully_shard
from composable_fsdp.features.guard.same_models import compare_models
from composable_fsdp.flat.value_hash import hash_values

GOAL = 0.05
"""The largest part of set-up that the comparison without the hash may take."""


def set_up(units: int, world: int, check_weights: Any) -> tuple[float, float]:
    """Return CPU seconds of sharding with the first step, and of the comparison."""
    torch.set_num_threads(1)
    with null_world(world):
        model = TinyModel(units)

        def shard(model: nn.Module) -> None:
            for block in model.get_submodule("blocks").children():
                fully_shard(block, check_weights=check_weights)
            fully_shard(model, check_weights=check_weights)

        shard(TinyModel(2))  # imports and caches
        batch = torch.ones(4, 8)
        total = cpu_seconds(lambda: shard(model))
        state = fully_shard.state(model)
        assert state is not None
        compared = cpu_seconds(lambda: compare_models(state, replicas=True))
        total += compared + cpu_seconds(lambda: model(batch).sum().backward())
    return total, compared


def speed(mebibytes: int, dtype: torch.dtype, threads: int) -> float:
    """Return GiB of values of ``dtype`` that a rank hashes in a second."""
    torch.set_num_threads(threads)
    value = torch.randn(mebibytes * 2**20 // dtype.itemsize).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        hash_values([value])
        times.append(time.perf_counter() - start)
    return mebibytes / 1024 / min(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.fingerprint")
    parser.add_argument("--units", type=int, default=1000, help="units (1000)")
    parser.add_argument("--world", type=int, default=8, help="ranks (8)")
    parser.add_argument("--mebibytes", type=int, default=1024, help="hashed (1024)")
    parser.add_argument("--repeats", type=int, default=5, help="children (5)")
    options = parser.parse_args(arguments)
    say_versions()

    def child(how: str) -> tuple[float, float]:
        return in_child(lambda: set_up(options.units, options.world, how))

    found: dict[str, list[tuple[float, float]]] = {"off": [], "warn": []}
    for _ in range(options.repeats):
        for how, each in found.items():
            each.append(child(how))
    without, compared = map(statistics.median, zip(*found["off"], strict=True))
    with_hash, _ = map(statistics.median, zip(*found["warn"], strict=True))
    table(
        f"Set-up of {options.units} units, CPU seconds (median of {options.repeats})",
        ("", "seconds", "part of set-up"),
        [
            ("set-up without any comparison", *fixed([without - compared], 4), ""),
            (
                f"comparison without the hash (goal {GOAL})",
                *fixed([compared, compared / (without - compared)], 4),
            ),
            (
                "hash of small weights",
                *fixed(
                    [with_hash - without, (with_hash - without) / (without - compared)],
                    4,
                ),
            ),
        ],
    )
    rows = [
        (str(dtype), *fixed((speed(options.mebibytes, dtype, n) for n in (1, 2)), 2))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    table(
        f"Hash of {options.mebibytes} MiB of weights, GiB/s per rank (goal 1)",
        ("", "1 thread", "2 threads"),
        rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
