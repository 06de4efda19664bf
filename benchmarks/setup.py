"""Set-up: CPU time from a built plain model to the end of its first step.

    python -m benchmarks.setup                           # 1,000 units
    python -m benchmarks.setup --units 100 1000 5000     # minutes at 5,000

The libraries take turns, each figure in a fresh fork with imports paid beforehand by a
model of two units. Two definitions stand side by side, from the same run:

    set-up         sharding + first forward and backward
    with update    that + first clip and first AdamW step

Clip and AdamW work tensor by tensor here (``foreach=False``), for all. With list
operators torch plans, once, each operator over FSDP2's n DTensors in n parts and reads
all n specs for each: 5 s at 100 units, minutes at 1,000, which is a matter of DTensor
and not of sharding. ``--foreach`` shows it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.measure import cpu_seconds, in_child
from benchmarks.null_group import null_world
from benchmarks.tables import fixed, ratios, say, say_versions, table
from benchmarks.variants import NAMES, PARAMETERS, TinyModel, Trainee, Variant, choose

STEADY_STEPS = 5
LARGE = 1000  # units from which on the goal is that of a large model


@dataclass(frozen=True)
class SetUp:
    """CPU seconds: sharding a built model, its first step, and a later one."""

    shard: float
    first_forward_backward: float
    first_update: float
    steady_forward_backward: float
    steady_update: float

    @property
    def set_up(self) -> float:
        """Sharding and first forward and backward."""
        return self.shard + self.first_forward_backward

    @property
    def with_update(self) -> float:
        """The same with the first clip and optimizer step."""
        return self.set_up + self.first_update


def measure(variant: Variant, *, units: int, world: int, foreach: bool) -> SetUp:
    """Time sharding and steps; call it in a fresh child for each variant."""
    torch.set_num_threads(1)
    with null_world(world):
        small = Trainee(variant, variant.shard(TinyModel(2)), foreach=foreach)
        small.step()
        small.step()
        model = TinyModel(units)
        gc.collect()
        gc.freeze()

        start = time.process_time()
        sharded = variant.shard(model)
        shard = time.process_time() - start
        trainee = Trainee(variant, sharded, foreach=foreach)
        first, *steady = (
            (
                cpu_seconds(trainee.forward_backward),
                cpu_seconds(trainee.clip_and_update),
            )
            for _ in range(1 + STEADY_STEPS)
        )
    return SetUp(shard, *first, *map(statistics.median, zip(*steady, strict=True)))


def median_set_up(repeats: Sequence[SetUp]) -> SetUp:
    """Field-wise median over repeated measurements."""
    columns = zip(*(vars(repeat).values() for repeat in repeats), strict=True)
    return SetUp(*(statistics.median(column) for column in columns))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table for each number of units, write the JSON file."""
    options = _parse(arguments)
    variants, absence = choose(options.only)
    if absence:
        say(absence)
    say_versions(f"; {PARAMETERS} parameters a unit, world {options.world}")
    results = {units: _run(variants, units, options) for units in options.units}
    if len(results) > 1 and "ours" in results[options.units[0]]:
        _say_growth(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.setup")
    add = parser.add_argument
    add("--units", type=int, nargs="+", default=[1000], help="sizes (1000)")
    add("--world", type=int, default=8, help="world size of the null group (8)")
    add("--repeats", type=int, default=3, help="children per figure (3)")
    add("--foreach", action="store_true", help="clip and AdamW use list operators")
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="besides plain")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(arguments)


def _run(
    variants: Sequence[Variant], units: int, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    def one(variant: Variant) -> SetUp:
        return in_child(
            lambda: measure(
                variant, units=units, world=options.world, foreach=options.foreach
            )
        )

    samples: dict[str, list[SetUp]] = {variant.name: [] for variant in variants}
    for _ in range(options.repeats):
        for variant in variants:
            samples[variant.name].append(one(variant))
    medians = {name: median_set_up(repeats) for name, repeats in samples.items()}
    rows = {
        name: {**asdict(row), "set_up": row.set_up, "with_update": row.with_update}
        for name, row in medians.items()
    }
    table(
        f"Set-up of {units} units, CPU seconds (median of {options.repeats} children)",
        (
            "",
            "shard",
            "first fwd+bwd",
            "first clip+opt",
            "later fwd+bwd",
            "later clip+opt",
            "set-up",
            "with update",
        ),
        [(name, *fixed(row.values(), 4)) for name, row in rows.items()],
    )
    goal = "0.15" if units >= LARGE else "0.20"
    ratios("ours / the peer", rows, {"shard": "", "set_up": goal, "with_update": goal})
    return rows


def _say_growth(results: dict[int, dict[str, dict[str, float]]]) -> None:
    """Whether set-up is linear: microseconds per unit at each size."""
    table(
        "Set-up per unit, CPU microseconds (linear: the same in each row)",
        ("", *next(iter(results.values()))),
        [
            (
                f"{n} units",
                *fixed((1e6 * row["set_up"] / n for row in rows.values()), 0),
            )
            for n, rows in results.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
