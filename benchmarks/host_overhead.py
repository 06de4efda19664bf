"""Host overhead of ours, FSDP1, FSDP2 and DDP over the plain model, as ratios.

Run from the repository's root; ``benchmarks/README.md`` says how to read the tables:

    python -m benchmarks.host_overhead                       # steps and counts
    python -m benchmarks.host_overhead --what setup --setup 100 1000
    python -m benchmarks.host_overhead --profile ours        # its hot spots
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.counting import Counts, counts
from benchmarks.measure import (
    SetUp,
    StepTime,
    in_child,
    median_set_up,
    set_up,
    step_times,
    warm_trainee,
)
from benchmarks.null_group import null_world
from benchmarks.variants import NAMES, PLAIN, Variant, choose

WHAT = ("steps", "counts", "setup", "all")
PROFILED_STEPS = 20
PROFILE_LINES = 40

Record = dict[str, dict[str, object]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, print tables, write the JSON file."""
    options = _parse(arguments)
    names = (options.profile,) if options.profile else tuple(options.only)
    variants, absence = choose(names)
    if absence:
        _say(absence)
    if options.profile:
        return _profile(variants[-1], options) if len(variants) > 1 else 1

    _say(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"world size {options.world}; ratios carry to another machine, times do not."
    )
    results: dict[str, object] = {"torch": torch.__version__, **vars(options)}
    if options.what in ("steps", "all"):
        results["steps"] = _run_steps(variants, options)
    if options.what in ("counts", "all"):
        results["counts"] = _run_counts(variants, options)
    if options.what in ("setup", "all"):
        results["setup"] = {n: _run_setup(variants, n, options) for n in options.setup}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.host_overhead")
    add = parser.add_argument
    add("--what", choices=WHAT, default="all", help="which measurements (all)")
    add("--units", type=int, default=64, help="units of the stepped model (64)")
    add("--world", type=int, default=8, help="world size of the null group (8)")
    add("--rounds", type=int, default=20, help="rounds of turns for the steps (20)")
    add("--setup", type=int, nargs="+", default=[100, 1000], metavar="N")
    add("--repeats", type=int, default=3, help="children per set-up figure (3)")
    add("--with-update", action="store_true", help="set-up steps clip and update too")
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="besides plain")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    add("--profile", choices=NAMES, help="profile one forward + backward instead")
    return parser.parse_args(arguments)


def _run_steps(variants: Sequence[Variant], options: argparse.Namespace) -> Record:
    found: Mapping[str, StepTime] = in_child(
        lambda: step_times(
            variants,
            units=options.units,
            world_size=options.world,
            rounds=options.rounds,
        )
    )
    _table(
        f"CPU microseconds per unit and step over plain ({options.units} units, median "
        f"of {options.rounds} rounds)",
        ("", "forward+backward", "clip+optimizer", "whole step", "+/-"),
        [(_label(name), *_fixed(asdict(row), 0)) for name, row in found.items()],
    )
    _ratios(
        "overhead of ours / overhead of the peer",
        {name: asdict(row) for name, row in found.items()},
        ("forward_backward", "step"),
    )
    return {name: asdict(row) for name, row in found.items()}


def _run_counts(variants: Sequence[Variant], options: argparse.Namespace) -> Record:
    found: Mapping[str, Counts] = in_child(
        lambda: counts(variants, units=options.units, world_size=options.world)
    )
    rows = {name: asdict(row.per(options.units)) for name, row in found.items()}
    _table(
        f"Exact counts per unit and step over plain ({options.units} units): calls "
        "Python can see, operators dispatched (without collectives), collectives",
        ("", "calls fwd+bwd", "calls step", "ops fwd+bwd", "ops step", "collectives"),
        [(_label(name), *_fixed(row, 1)) for name, row in rows.items()],
    )
    _ratios(
        "calls of ours / calls of the peer",
        rows,
        ("calls_forward_backward", "calls_step"),
    )
    return {name: dict(row) for name, row in rows.items()}


def _run_setup(
    variants: Sequence[Variant], units: int, options: argparse.Namespace
) -> Record:
    def measure(variant: Variant) -> SetUp:
        return in_child(
            lambda: set_up(
                variant,
                units=units,
                world_size=options.world,
                with_update=options.with_update,
            )
        )

    found = {
        variant.name: median_set_up([measure(variant) for _ in range(options.repeats)])
        for variant in variants
    }
    rows = {
        name: {**asdict(row), "shard_and_first": row.shard + row.first_step}
        for name, row in found.items()
    }
    _table(
        f"Set-up of {units} units, CPU seconds (median of {options.repeats} children)",
        ("", "shard", "first step", "steady step", "shard+first"),
        [(name, *_fixed(row, 4)) for name, row in rows.items()],
    )
    _ratios("ours / the peer", rows, ("shard", "shard_and_first", "steady_step"))
    return {name: dict(row) for name, row in rows.items()}


def _ratios(
    title: str, rows: Mapping[str, Mapping[str, float]], fields: Sequence[str]
) -> None:
    """Print ours over each sharding peer that ran, for the fields given."""
    peers = [name for name in ("fsdp1", "fsdp2") if name in rows]
    if "ours" not in rows or not peers:
        return
    lines = [
        (f"ours/{peer}", *(f"{rows['ours'][f] / rows[peer][f]:.3f}" for f in fields))
        for peer in peers
    ]
    _table(title, ("", *(field.replace("_", " ") for field in fields)), lines)


def _profile(variant: Variant, options: argparse.Namespace) -> int:
    """Print where the forward and backward of one variant spend their own time."""
    with null_world(options.world):
        trainee = warm_trainee(variant, options.units)
        profiler = cProfile.Profile()
        gc.collect()
        gc.disable()
        for _ in range(PROFILED_STEPS):
            profiler.enable()
            trainee.forward_backward()
            profiler.disable()
            trainee.clip_and_update()
        gc.enable()
    per_unit = PROFILED_STEPS * options.units
    _say(f"{variant.name}: divide calls and time by {per_unit} for one unit and step")
    stats = pstats.Stats(profiler, stream=sys.stdout)
    stats.sort_stats("tottime").print_stats(PROFILE_LINES)
    return 0


def _label(name: str) -> str:
    return f"{name} (absolute)" if name == PLAIN.name else name


def _fixed(row: Mapping[str, float], digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in row.values()]


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    _say(f"\n{title}")
    for cells in (header, *rows):
        first, *numbers = (
            f"{cell:{'<' if place == 0 else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        _say("  " + "  ".join((first, *numbers)))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
