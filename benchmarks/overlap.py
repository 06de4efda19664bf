"""What prefetch gives and takes on a slow network, beside FSDP1 and FSDP2.

Run from the repository's root; two minutes on one core, all of it without a GPU:

    python -m benchmarks.overlap                    # both tables
    python -m benchmarks.overlap --what wall        # matrix products and a real clock
    python -m benchmarks.overlap --what roberta     # a model of 1.4 GB, simulated

*wall*: units of two ``Linear(1024, 1024)`` compute on one thread; collectives finish
when a link of so many bytes a second would be done. *roberta*: the shapes of
RoBERTa-large on fake tensors; the libraries go the way they go on a GPU (streams stood
in for), memory is counted op by op, and time is computed from what was issued, in which
order, and what waited for what (``schedule.py``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.link_group import WallLink, link_world
from benchmarks.measure import in_child
from benchmarks.prefetch_ways import WORLD, Block, Chain, Model, Roberta, Way, ways
from benchmarks.schedule import (
    Schedule,
    Span,
    counting,
    hidden,
    on_streams,
    seconds,
)
from benchmarks.tables import say_versions, table
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.memory import LiveBytes, fake_tensors

MB = 1e6


def _step(model: nn.Module, example: Tensor) -> None:
    model(example).float().sum().backward()
    for param in model.parameters():
        param.grad = None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # FSDP1 deplores CPU runs and what torch 2.13 renamed under it.
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class WallResult:
    """Of one way: per bandwidth, least seconds of a step, median of its waiting."""

    steps: list[tuple[float, float]]
    peak: int
    planned: int | None


def measure_wall(
    megabytes_per_second: Sequence[float], *, units: int, batch: int, rounds: int
) -> dict[str, WallResult]:
    """Step all ways in turn on each link; the first link is for nothing (infinite)."""
    torch.set_num_threads(1)
    link = WallLink(float("inf"))
    results = {}
    with _quiet(), link_world(WORLD, link):
        chosen = ways(streams=False)
        example, row = torch.randn(batch, Block.WIDTH), torch.randn(1, Block.WIDTH)
        peaks, plans, models = {}, {}, {}
        for way in chosen:
            with LiveBytes() as live:
                models[way.name] = way.shard(Chain(units))
                _step(models[way.name], row)
                live.reset()
                _step(models[way.name], row)
            peaks[way.name] = live.peak
            plans[way.name] = way.planned(Chain(units), "cpu")
        samples: dict[str, list[list[tuple[float, float]]]] = {
            way.name: [[] for _ in megabytes_per_second] for way in chosen
        }
        for _ in range(rounds):
            for i, speed in enumerate(megabytes_per_second):
                link.bytes_per_second = speed * MB
                for name, model in models.items():
                    samples[name][i].append(_timed(link, model, example))
    for name, rows in samples.items():
        medians = [
            (min(step for step, _ in row), statistics.median(wait for _, wait in row))
            for row in rows
        ]
        results[name] = WallResult(medians, peaks[name], plans[name])
    return results


def _timed(link: WallLink, model: nn.Module, example: Tensor) -> tuple[float, float]:
    waited, start = link.waited, time.perf_counter()
    _step(model, example)
    return time.perf_counter() - start, link.waited - waited


@dataclass(frozen=True)
class SimulatedResult:
    """Of one way: its schedule, bytes at the peak, and what the plan says of them."""

    schedule: Schedule
    peak: int
    planned: int | None


def simulate(
    make: Callable[[], Model], tokens: tuple[int, int], names: Sequence[str] = ()
) -> dict[str, SimulatedResult]:
    """Run the second step of each way on fake tensors and streams that note."""
    results = {}
    schedule = Schedule()
    with _quiet(), link_world(WORLD, schedule):
        for way in ways(streams=True):
            if not names or way.name in names:
                results[way.name] = _simulate(way, schedule, make, tokens)
    return results


def _simulate(
    way: Way, schedule: Schedule, make: Callable[[], Model], tokens: tuple[int, int]
) -> SimulatedResult:
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        live = stack.enter_context(LiveBytes())
        model = make()
        planned = way.planned(model, "cuda")
        if way.ours is not None:
            sharded = way.shard(model)
            stack.enter_context(on_streams(schedule, _get_fsdp_handles(sharded)))
        else:
            stack.enter_context(on_streams(schedule))
            sharded = way.shard(model)
        example = torch.zeros(tokens, dtype=torch.long)
        stack.enter_context(counting(schedule))
        _step(sharded, example)
        schedule.events = []
        live.reset()
        _step(sharded, example)
        noted = Schedule()
        noted.events, schedule.events = schedule.events, []
    return SimulatedResult(noted, live.peak, planned)


def run_wall(options: argparse.Namespace) -> None:
    """Print step times, waiting and peaks of the wall-clock runs."""
    speeds = [float("inf"), *options.megabytes]
    found = in_child(
        lambda: measure_wall(
            speeds, units=options.units, batch=options.batch, rounds=options.rounds
        )
    )
    header = [
        "",
        *("no wait" if s == float("inf") else f"{s:.0f} MB/s" for s in speeds),
    ]
    compute = min(result.steps[0][0] for result in found.values())
    moved = Block.WIDTH * (Block.WIDTH + 1) * 2 * 4 * (WORLD - 1) / WORLD / MB
    forward = compute * 1e3 / 3 / options.units
    table(
        f"Milliseconds of a step, of which waiting for the link: {options.units} units,"
        f" {moved:.1f} MB a collective, forward of one unit {forward:.1f} ms (least"
        f" step, median wait of {options.rounds} rounds, one thread)",
        header,
        [
            (name, *(f"{s * 1e3:.0f} ({w * 1e3:.0f})" for s, w in result.steps))
            for name, result in found.items()
        ],
    )
    table(
        "Peak of a step on one row, MB: parameters, gradients and buffers",
        ("", "counted", "planned"),
        [(n, _mb(result.peak), _mb(result.planned)) for n, result in found.items()],
    )


def run_roberta(options: argparse.Namespace) -> None:
    """Print simulated step times, hidden communication, peaks and the two ratios."""
    tokens = tuple(options.tokens)
    found = in_child(lambda: simulate(partial(Roberta, options.layers), tokens))
    speeds = [float(g) for g in options.gigabytes]

    def spans(result: SimulatedResult, gigabytes: float) -> list[Span]:
        return result.schedule.times(
            operations_per_second=options.teraflops * 1e12,
            bytes_per_second=gigabytes * 1e9,
            latency=options.latency * 1e-6,
        )

    header = ["", *(f"{speed:g} GB/s" for speed in speeds)]
    rows = {
        name: [(seconds(s), hidden(s)) for s in (spans(result, g) for g in speeds)]
        for name, result in found.items()
    }
    table(
        f"RoBERTa-large, {options.layers} layers, world {WORLD}, {tokens[0]} x "
        f"{tokens[1]} tokens a rank, fp32, {options.teraflops:g} TFLOP/s: simulated "
        "milliseconds of a step, part of the communication that is hidden",
        header,
        [
            (name, *(f"{s * 1e3:.0f} ({h:.0%})" for s, h in row))
            for name, row in rows.items()
        ],
    )
    gained = [
        f"{none / pre - 1:+.0%}"
        for (none, _), (pre, _) in zip(rows["ours none"], rows["ours PRE"], strict=True)
    ]
    table(
        "Speed with PRE over none (claimed: +20%, slow network)",
        header,
        [("ours", *gained)],
    )
    _run_memory(found)


def _run_memory(found: dict[str, SimulatedResult]) -> None:
    base = found["ours none"]
    rows = []
    for name, result in found.items():
        cells = [_mb(result.peak), f"{result.peak / base.peak - 1:+.1%}"]
        if result.planned and base.planned:
            cells += [_mb(result.planned), f"{result.planned / base.planned - 1:+.1%}"]
        else:
            cells += ["", ""]
        rows.append((name, *cells))
    table(
        "Peak of a step, MB: counted with activations, and planned without; each "
        "against ours without prefetch (claimed: +10%)",
        ("", "counted", "over none", "planned", "over none"),
        rows,
    )


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MB:.1f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.overlap")
    add = parser.add_argument
    add("--what", choices=("wall", "roberta", "all"), default="all")
    add("--rounds", type=int, default=5, help="wall: rounds of turns (5)")
    add("--units", type=int, default=8, help="wall: units (8)")
    add("--batch", type=int, default=128, help="wall: rows of the input (128)")
    add("--megabytes", type=float, nargs="+", default=[400, 800, 1600], metavar="MB/S")
    add("--layers", type=int, default=24, help="roberta: layers (24)")
    add("--tokens", type=int, nargs=2, default=(8, 512), metavar=("BATCH", "TIME"))
    add("--teraflops", type=float, default=15.0, help="roberta: of a rank (15)")
    add("--latency", type=float, default=20.0, help="roberta: microseconds (20)")
    add("--gigabytes", type=float, nargs="+", default=[1, 3, 6, 10, 30, 100])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for and print tables."""
    options = _parse(arguments)
    say_versions(f", world {WORLD}")
    if options.what in ("wall", "all"):
        run_wall(options)
    if options.what in ("roberta", "all"):
        run_roberta(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
