"""Host overhead of ours, FSDP1, FSDP2 and DDP over the plain model, as ratios.

Run from the repository's root; ``benchmarks/README.md`` says how to read the tables:

    python -m benchmarks.host_overhead                  # one cell of each of ``WHAT``
    python -m benchmarks.host_overhead --what cells --units 16 64 256 --world 8 128 1024
    python -m benchmarks.host_overhead --profile ours   # its hot spots
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from benchmarks.counting import Counts, counts
from benchmarks.measure import (
    StepTime,
    in_child,
    overheads,
    step_times,
    updates,
    warm_trainee,
)
from benchmarks.null_group import null_world
from benchmarks.tables import fixed, ratios, say, say_versions, table
from benchmarks.variants import NAMES, PARAMETERS, PLAIN, Variant, choose

WHAT = ("steps", "counts", "cells", "updates", "all")
PROFILED_STEPS = 20
PROFILE_LINES = 40

Record = dict[str, dict[str, object]]
PerRound = dict[tuple[str, int], list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, print tables, write the JSON file."""
    options = _parse(arguments)
    names = (options.profile,) if options.profile else tuple(options.only)
    variants, absence = choose(names)
    if absence:
        say(absence)
    if options.profile:
        return _profile(variants[-1], options) if len(variants) > 1 else 1

    say_versions("; ratios carry to another machine, times do not")
    results: dict[str, object] = {"torch": torch.__version__, **vars(options)}
    sizes = list(product(options.units, options.world))
    if options.what in ("cells", "all"):
        results["cells"] = [_run_cells(variants, *size, options) for size in sizes]
    if options.what in ("updates", "all"):
        results["updates"] = [_run_updates(variants, *size, options) for size in sizes]
    if options.what in ("steps", "all"):
        results["steps"] = [_run_steps(variants, *size, options) for size in sizes]
    if options.what in ("counts", "all"):
        results["counts"] = [_run_counts(variants, *size, options) for size in sizes]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.host_overhead")
    add = parser.add_argument
    add("--what", choices=WHAT, default="all", help="which measurements (all)")
    add("--units", type=int, nargs="+", default=[64], help="units of the model (64)")
    add("--world", type=int, nargs="+", default=[8], help="size of the null group (8)")
    add(
        "--parameters",
        type=int,
        nargs="+",
        default=[2, 6, 18],
        help="parameters a unit, of --what cells and the first of --profile (2 6 18)",
    )
    add("--rounds", type=int, default=20, help="rounds of turns (20)")
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="besides plain")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    add("--profile", choices=NAMES, help="profile one forward + backward instead")
    return parser.parse_args(arguments)


def _run_cells(
    variants: Sequence[Variant], units: int, world: int, options: argparse.Namespace
) -> Record:
    """Forward and backward at each number of parameters: FSDP2, ours, their ratio."""
    shown = [each for each in variants if each.name in ("plain", "fsdp2", "ours")]
    found = _measured(overheads, shown, units, world, options)
    medians = {key: statistics.median(rounds) for key, rounds in found.items()}
    names = [variant.name for variant in shown]
    rows = [
        (
            f"{number} parameters",
            *(f"{medians[name, number]:.0f}" for name in names),
            _against(found, "ours", "fsdp2", number),
            "0.20, aim 0.15",
        )
        for number in options.parameters
    ]
    few, many = min(options.parameters), max(options.parameters)
    if many > few:
        each = [
            statistics.median(_differences(found, name, few, many)) for name in names
        ]
        rows.append(("per extra parameter", *fixed(each, 1), "", "15 us"))
    table(
        f"Forward + backward, {units} units, world {world}: CPU us per unit and "
        f"step over plain (median of {options.rounds} rounds)",
        ("", *map(_label, names), "ours/fsdp2", "goal"),
        rows,
    )
    return {
        "size": {"units": units, "world": world},
        "us": {f"{name}, {number}": us for (name, number), us in medians.items()},
    }


def _measured(
    measure: Callable[..., PerRound],
    variants: Sequence[Variant],
    units: int,
    world: int,
    options: argparse.Namespace,
) -> PerRound:
    """What ``measure`` finds in a child, at each number of parameters."""
    return in_child(
        lambda: measure(
            variants,
            units=units,
            parameters=options.parameters,
            world_size=world,
            rounds=options.rounds,
        )
    )


def _run_updates(
    variants: Sequence[Variant], units: int, world: int, options: argparse.Namespace
) -> Record:
    """Clip and AdamW at each number of parameters, against the plain model's."""
    goals = {"ours": "1", "ours flat": "1 at 2, 0.4 from 6"}
    shown = [each for each in variants if each.name == "plain" or each.name in goals]
    found = _measured(updates, shown, units, world, options)
    names = [variant.name for variant in shown if variant.name in goals]
    table(
        f"Clip and AdamW, {units} units, world {world}: CPU us per unit and step, and "
        f"against plain's (median of {options.rounds} rounds)",
        ("", "plain (absolute)", *names),
        [
            *(
                (
                    f"{number} parameters",
                    f"{statistics.median(found['plain', number]):.0f}",
                    *(_against(found, name, "plain", number) for name in names),
                )
                for number in options.parameters
            ),
            ("goal", "", *(goals[name] for name in names)),
        ],
    )
    return {
        "size": {"units": units, "world": world},
        "us": {f"{n}, {p}": statistics.median(us) for (n, p), us in found.items()},
    }


def _against(
    found: Mapping[tuple[str, int], Sequence[float]],
    name: str,
    other: str,
    parameters: int,
) -> str:
    """Median over rounds of one variant's time over another's, if both ran."""
    if not {(name, parameters), (other, parameters)} <= found.keys():
        return ""
    pairs = zip(found[name, parameters], found[other, parameters], strict=True)
    return f"{statistics.median(ours / theirs for ours, theirs in pairs):.3f}"


def _differences(
    found: Mapping[tuple[str, int], Sequence[float]], name: str, few: int, many: int
) -> list[float]:
    pairs = zip(found[name, many], found[name, few], strict=True)
    return [(more - less) / (many - few) for more, less in pairs]


def _run_steps(
    variants: Sequence[Variant], units: int, world: int, options: argparse.Namespace
) -> Record:
    found: Mapping[str, StepTime] = in_child(
        lambda: step_times(
            variants, units=units, world_size=world, rounds=options.rounds
        )
    )
    rows = {name: asdict(row) for name, row in found.items()}
    table(
        f"Whole steps, {units} units of {PARAMETERS} parameters, world {world}: CPU us "
        f"per unit and step over plain (median of {options.rounds} rounds)",
        ("", "forward+backward", "clip+optimizer", "whole step", "+/-"),
        [(_label(name), *fixed(row.values(), 0)) for name, row in rows.items()],
    )
    ratios(
        "overhead of ours / overhead of the peer",
        rows,
        {"forward_backward": "0.20, aim 0.15", "step": ""},
    )
    return {name: dict(row) for name, row in rows.items()}


def _run_counts(
    variants: Sequence[Variant], units: int, world: int, options: argparse.Namespace
) -> Record:
    found: Mapping[str, Counts] = in_child(
        lambda: counts(variants, units=units, world_size=world)
    )
    rows = {name: asdict(row.per(units)) for name, row in found.items()}
    table(
        f"Exact counts, {units} units of {PARAMETERS} parameters, world {world}, per "
        "unit and step over plain:\n"
        "calls Python can see, operators dispatched (without collectives), collectives",
        ("", "calls fwd+bwd", "calls step", "ops fwd+bwd", "ops step", "collectives"),
        [
            *((_label(name), *fixed(row.values(), 1)) for name, row in rows.items()),
            ("goal", "300", "", "25", "", ""),
        ],
    )
    ratios(
        "calls of ours / calls of the peer",
        rows,
        {"calls_forward_backward": "", "calls_step": ""},
    )
    return {name: dict(row) for name, row in rows.items()}


def _profile(variant: Variant, options: argparse.Namespace) -> int:
    """Print where the forward and backward of one variant spend their own time."""
    units, parameters = options.units[0], options.parameters
    number = PARAMETERS if PARAMETERS in parameters else parameters[0]
    with null_world(options.world[0]):
        trainee = warm_trainee(variant, units, number)
        profiler = cProfile.Profile()
        gc.collect()
        gc.disable()
        for _ in range(PROFILED_STEPS):
            profiler.enable()
            trainee.forward_backward()
            profiler.disable()
            trainee.clip_and_update()
        gc.enable()
    per_unit = PROFILED_STEPS * units
    say(f"{variant.name}: divide calls and time by {per_unit} for one unit and step")
    stats = pstats.Stats(profiler, stream=sys.stdout)
    stats.sort_stats("tottime").print_stats(PROFILE_LINES)
    return 0


def _label(name: str) -> str:
    return f"{name} (absolute)" if name == PLAIN.name else name


if __name__ == "__main__":
    sys.exit(main())
