"""A training step on two gloo ranks: DDP, FSDP1, FSDP2 and ours on a small GPT.

    python -m benchmarks.step                   # fp32 and bf16, three minutes
    python -m benchmarks.step --profile ours    # where a rank's Python spends it

All libraries live in one pair of processes and take turns in a turning order; a figure
is the CPU time of a step summed over both ranks, threads of gloo included, over DDP's
of the same round. Gradients are clipped and AdamW steps with ``foreach``, as users do.
On the CPU what a GPU's network and copy engines would do is CPU time too.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision as Precision1
from torch.distributed.fsdp import MixedPrecisionPolicy as Precision2
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import composable_fsdp as ours
from benchmarks.tables import fixed, say_versions, table
from tests.support.pool import RankPool
from tests.support.tiny import TinyBlock, TinyGPT
from tests.support.world import World

NAMES = ("ddp", "fsdp1", "fsdp2", "ours")
PRECISIONS = ("fp32", "bf16")
VOCABULARY, CONTEXT, HEADS = 512, 64, 4
STEPS_PER_TURN = 2
WARM_UP_STEPS = 3
PROFILE_LINES = 30
TIMEOUT = 1800.0
MAX_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """What is trained: ``layers`` blocks of ``width``, ``batch`` rows a rank."""

    layers: int
    width: int
    batch: int


class Trainee:
    """A library's model and optimizer; compute in bfloat16 keeps fp32 elsewhere."""

    def __init__(self, name: str, precision: str, size: Size) -> None:
        model = TinyGPT(VOCABULARY, size.width, size.layers, HEADS, CONTEXT)
        self._autocast = name == "ddp" and precision == "bf16"
        self._name = name
        self.model = _shard(name, model, low=precision == "bf16")
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, foreach=True
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._tokens = torch.randint(
            VOCABULARY, (size.batch, CONTEXT), generator=generator
        )

    def step(self) -> None:
        """Forward, backward, clip, update."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            logits = self.model(self._tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self._tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if self._name == "ours":
            ours.clip_grad_norm_(self.model, MAX_NORM)
        elif isinstance(self.model, FSDP1):
            self.model.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _shard(name: str, model: TinyGPT, *, low: bool) -> nn.Module:
    dtype, reduce_dtype = (torch.bfloat16, torch.float32) if low else (None, None)
    if name == "ddp":
        return DistributedDataParallel(model)
    if name == "fsdp1":
        return FSDP1(
            model,
            auto_wrap_policy=ModuleWrapPolicy({TinyBlock}),
            mixed_precision=Precision1(dtype, reduce_dtype),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    if name == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = Precision2(dtype, reduce_dtype)
        for block in model.blocks:
            fsdp2_fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    precision = ours.MixedPrecision(dtype, reduce_dtype)
    for block in model.blocks:
        ours.fully_shard(block, mixed_precision=precision)
    return ours.fully_shard(model, mixed_precision=precision)


def rounds_on_a_rank(
    world: World, names: Sequence[str], precision: str, size: Size, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of a step on this rank, for each library and round.

    Collective: all ranks must call.
    """
    trainees = _warm(names, precision, size)
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = list(names)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name in order:
            samples[name].append(_turn(trainees[name]))
        order.append(order.pop(0))
    gc.unfreeze()
    return samples


def _warm(names: Sequence[str], precision: str, size: Size) -> dict[str, Trainee]:
    torch.set_num_threads(1)
    trainees = {name: Trainee(name, precision, size) for name in names}
    for trainee in trainees.values():
        for _ in range(WARM_UP_STEPS):
            trainee.step()
    return trainees


def _turn(trainee: Trainee) -> float:
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.process_time()
    for _ in range(STEPS_PER_TURN):
        trainee.step()
    # What gloo's threads still do for the last collective belongs to this turn.
    dist.barrier()
    seconds = time.process_time() - start
    gc.enable()
    return seconds / STEPS_PER_TURN


def profile_on_a_rank(world: World, name: str, precision: str, size: Size) -> str:
    """The table of a profile of ten steps, on rank 0; the others only step.

    Collective: all ranks must call.
    """
    trainee = _warm([name], precision, size)[name]
    profiler = cProfile.Profile()
    if world.rank == 0:
        profiler.enable()
    for _ in range(10):
        trainee.step()
    profiler.disable()
    text = io.StringIO()
    if world.rank == 0:
        stats = pstats.Stats(profiler, stream=text)
        stats.sort_stats("tottime").print_stats(PROFILE_LINES)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table for each precision, write the JSON file."""
    options = _parse(arguments)
    size = Size(options.layers, options.width, options.batch)
    say_versions(f"; 2 gloo ranks, {size}, {CONTEXT} tokens a row")
    with RankPool(2, "gloo") as pool:
        if options.profile:
            for precision in options.precision:
                job = (profile_on_a_rank, options.profile, precision, size)
                print(precision, pool.run(*job, timeout=TIMEOUT)[0])
            return 0
        results = {each: _run(pool, each, size, options) for each in options.precision}
    if options.json:
        record = {"size": asdict(size), "seconds": results}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.step")
    add = parser.add_argument
    add("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    add("--layers", type=int, default=6, help="blocks, a unit each (6)")
    add("--width", type=int, default=256, help="width (256)")
    add("--batch", type=int, default=4, help="rows a rank (4)")
    add("--rounds", type=int, default=20, help="rounds of turns (20)")
    add("--only", nargs="+", choices=NAMES, default=NAMES)
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    add("--profile", choices=NAMES, help="profile rank 0 of one library instead")
    return parser.parse_args(arguments)


def _run(
    pool: RankPool, precision: str, size: Size, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each library in each round, summed over the ranks."""
    ranks = pool.run(
        rounds_on_a_rank,
        options.only,
        precision,
        size,
        options.rounds,
        timeout=TIMEOUT,
    )
    sums = {
        name: [
            sum(turns) for turns in zip(*(each[name] for each in ranks), strict=True)
        ]
        for name in options.only
    }
    peers = [name for name in options.only if name != "ours"]
    goals = {
        "ddp": "",
        "fsdp1": "1.03",
        "fsdp2": "0.95" if precision == "fp32" else "1",
    }
    table(
        f"A step in {precision}, CPU ms summed over ranks (median of {options.rounds} "
        "rounds)",
        ("", *options.only),
        [("ms", *fixed((1e3 * statistics.median(sums[n]) for n in options.only), 1))],
    )
    if "ours" in sums and peers:
        lines = [_quartiles(sums["ours"], sums[peer]) for peer in peers]
        table(
            "ours / the peer within a round, median and quartiles",
            ("", "median", "25 %", "75 %", "goal"),
            [
                (f"ours/{p}", *line, goals[p])
                for p, line in zip(peers, lines, strict=True)
            ],
        )
    return sums


def _quartiles(mine: Sequence[float], theirs: Sequence[float]) -> list[str]:
    quotients = [one / other for one, other in zip(mine, theirs, strict=True)]
    low, middle, high = statistics.quantiles(quotients, n=4)
    return fixed((middle, low, high), 3)


if __name__ == "__main__":
    sys.exit(main())
