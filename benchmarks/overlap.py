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
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.link_group import WallLink, link_world
from benchmarks.measure import in_child
from benchmarks.schedule import Schedule, counting, hidden, on_streams, seconds
from benchmarks.tables import say, table
from composable_fsdp import BackwardPrefetch, fully_shard, plan
from composable_fsdp.testing.memory import LiveBytes, fake_tensors
from composable_fsdp.testing.tiny import TinyBlock
from composable_fsdp.tree.traversal import _get_fsdp_handles

WORLD = 8
MB = 1e6
PRE, POST = BackwardPrefetch


class Block(nn.Module):
    """The unit of the wall-clock runs: 2.1 M parameters."""

    WIDTH = 1024

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(self.WIDTH, self.WIDTH)
        self.down = nn.Linear(self.WIDTH, self.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Chain(nn.Module):
    """Blocks in a row; the root owns a gain, so that inputs need gradients."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(Block.WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return x


class Roberta(nn.Module):
    """The shapes of RoBERTa-large with a tied head: 355 M parameters, 1.4 GB."""

    def __init__(self, layers: int = 24, width: int = 1024, vocab: int = 50265) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(514, width)
        self.blocks = nn.ModuleList(TinyBlock(width, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(batch, time)`` to logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


Model = Chain | Roberta
Shard = Callable[[Model], nn.Module]


def _ours(mode: BackwardPrefetch | None, ahead: bool, model: Model) -> nn.Module:
    options: dict[str, Any] = {"backward_prefetch": mode, "forward_prefetch": ahead}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _fsdp1(mode: TorchPrefetch | None, ahead: bool, model: Model) -> nn.Module:
    return FSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block, TinyBlock}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        backward_prefetch=mode,
        forward_prefetch=ahead,
    )


def _fsdp2(mesh: Any, asynchronous: bool, model: Model) -> nn.Module:
    for block in model.blocks:
        fsdp2_fully_shard(block, mesh=mesh)
    sharded = fsdp2_fully_shard(model, mesh=mesh)
    if asynchronous:
        sharded._set_unshard_async_op(True)
    return model


@dataclass(frozen=True)
class Way:
    """One library with one setting of its prefetch."""

    name: str
    shard: Shard
    ours: tuple[BackwardPrefetch | None, bool] | None = None

    def planned(self, model: Model, device_type: str) -> int | None:
        """The peak that our planner says of it, of ours only."""
        if self.ours is None:
            return None
        mode, ahead = self.ours
        blocks = ModuleWrapPolicy({Block, TinyBlock})
        options: dict[str, Any] = {"backward_prefetch": mode, "forward_prefetch": ahead}
        made = plan(model, world_size=WORLD, policy=blocks, **options)
        return made.peak(device_type=device_type).total


def _ways(*, streams: bool) -> list[Way]:
    """All settings; needs a process group. Without streams FSDP2 has one more."""
    mesh = init_device_mesh("cpu", (WORLD,))
    settings: list[tuple[str, BackwardPrefetch | None, bool]] = [
        ("ours PRE, forward", PRE, True),
        ("ours PRE", PRE, False),
        ("ours POST", POST, False),
        ("ours none", None, False),
    ]
    if streams:
        del settings[0]  # the host runs ahead: nothing left to prefetch
    ours = [
        Way(name, partial(_ours, mode, ahead), (mode, ahead))
        for name, mode, ahead in settings
    ]
    peers = [
        Way("fsdp1 PRE", partial(_fsdp1, TorchPrefetch.BACKWARD_PRE, not streams)),
        Way("fsdp2", partial(_fsdp2, mesh, False)),
    ]
    if not streams:
        peers.append(Way("fsdp2 async", partial(_fsdp2, mesh, True)))
    return [*ours, *peers]


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
    """Of one way: per bandwidth, median seconds of a step and of its waiting."""

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
        ways = _ways(streams=False)
        example, row = torch.randn(batch, Block.WIDTH), torch.randn(1, Block.WIDTH)
        peaks, plans, models = {}, {}, {}
        for way in ways:
            with LiveBytes() as live:
                models[way.name] = way.shard(Chain(units))
                _step(models[way.name], row)
                live.reset()
                _step(models[way.name], row)
            peaks[way.name] = live.peak
            plans[way.name] = way.planned(Chain(units), "cpu")
        samples: dict[str, list[list[tuple[float, float]]]] = {
            way.name: [[] for _ in megabytes_per_second] for way in ways
        }
        for _ in range(rounds):
            for i, speed in enumerate(megabytes_per_second):
                link.bytes_per_second = speed * MB
                for name, model in models.items():
                    samples[name][i].append(_timed(link, model, example))
    for name, rows in samples.items():
        medians = [
            (statistics.median(s for s, _ in row), statistics.median(w for _, w in row))
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
        for way in _ways(streams=True):
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
        f" {moved:.1f} MB a collective, forward of one unit {forward:.1f} ms (median of"
        f" {options.rounds} rounds, one thread)",
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

    def spans(result: SimulatedResult, gigabytes: float) -> Any:
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
    table("Speed with PRE over none", header, [("ours", *gained)])
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
        "against ours without prefetch",
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
    say(f"torch {torch.__version__}, Python {platform.python_version()}, world {WORLD}")
    if options.what in ("wall", "all"):
        run_wall(options)
    if options.what in ("roberta", "all"):
        run_roberta(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
