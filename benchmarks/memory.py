"""Peak memory of a step beside FSDP1, FSDP2 and a bare prototype, counted exactly.

Run from the repository's root; ``benchmarks/README.md`` says how to read the tables:

    python -m benchmarks.memory                          # world size 8, a minute
    python -m benchmarks.memory --worlds 8 64 1024       # all, some ten minutes

The model has 1.04 B parameters and computes in bfloat16, gradients are reduced in
float32. Tensors are fake: they have sizes and no memory, so the bytes that are alive
are counted op by op, the same on every machine. In CUDA's order the libraries go the
way they go on a GPU, with streams stood in for, and bytes are counted as the host
allocates and frees them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision as FSDP1Precision
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as FSDP1Policy

from benchmarks.floor import floor_shard
from benchmarks.models import Gpt
from benchmarks.schedule import Schedule, on_streams
from benchmarks.tables import say, say_versions, table
from composable_fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ModuleWrapPolicy,
    fully_shard,
    plan,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.memory import LiveBytes, cuda_order, fake_tensors
from tests.support.tiny import TinyBlock
from tests.support.world import fake_world

LAYERS = 20
COMPUTE, REDUCE = torch.bfloat16, torch.float32
SHORT, LONG = 1, 1024
"""Tokens of a batch: next to no activations, and more of them than of all else."""
MIB = 2**20

Shard = Callable[[Gpt, DeviceMesh], nn.Module]


def _fsdp1(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    return FSDP1(
        model,
        auto_wrap_policy=FSDP1Policy({TinyBlock}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        mixed_precision=FSDP1Precision(param_dtype=COMPUTE, reduce_dtype=REDUCE),
    )


def _fsdp2(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    precision = MixedPrecisionPolicy(param_dtype=COMPUTE, reduce_dtype=REDUCE)
    for block in (*model.blocks, model):
        fsdp2_fully_shard(block, mesh=mesh, mp_policy=precision)
    return model


def _floor(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    floor_shard(model, model.blocks, compute=COMPUTE, reduce=REDUCE)
    return model


OURS: tuple[tuple[str, BackwardPrefetch | None], ...] = (
    ("ours", BackwardPrefetch.BACKWARD_PRE),
    ("ours, BACKWARD_POST", BackwardPrefetch.BACKWARD_POST),
    ("ours, no prefetch", None),
)
ORDERS = {"cpu": "in the order of a CPU", "cuda": "in CUDA's order"}
PEERS: dict[str, Shard] = {"fsdp1": _fsdp1, "fsdp2": _fsdp2, "floor": _floor}


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at the peak of a step; ``planned``: without activations."""

    step: int
    planned: int = 0


def measure_peer(
    shard: Shard,
    world_size: int,
    tokens: int,
    *,
    order: str = "cpu",
    layers: int = LAYERS,
) -> Peak:
    """Count a steady step of a peer, in the order of ``cpu`` or ``cuda``."""
    with ExitStack() as stack:
        stack.enter_context(fake_world(world_size))
        # Its ranks are read as numbers, which fake tensors do not have.
        mesh = init_device_mesh("cpu", (world_size,))
        stack.enter_context(fake_tensors())
        live = stack.enter_context(LiveBytes())
        if order == "cuda":
            stack.enter_context(on_streams(Schedule()))
        model = shard(Gpt(layers), mesh)
        return Peak(_step(model, live, tokens))


def measure_ours(
    world_size: int,
    tokens: int,
    *,
    prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    order: str = "cpu",
    layers: int = LAYERS,
) -> Peak:
    """Count a steady step of ours, allocating in the order of ``cpu`` or ``cuda``."""
    precision = MixedPrecision(param_dtype=COMPUTE, reduce_dtype=REDUCE)
    with ExitStack() as stack:
        stack.enter_context(fake_world(world_size))
        stack.enter_context(fake_tensors())
        live = stack.enter_context(LiveBytes())
        model = Gpt(layers)
        policy = ModuleWrapPolicy({TinyBlock})
        plan_ = plan(
            model,
            world_size=world_size,
            policy=policy,
            mixed_precision=precision,
            backward_prefetch=prefetch,
        )
        fully_shard(
            model,
            policy=policy,
            mixed_precision=precision,
            backward_prefetch=prefetch,
        )
        if order == "cuda":
            stack.enter_context(cuda_order(_get_fsdp_handles(model)))
        planned = plan_.peak(device_type=order).total
        return Peak(_step(model, live, tokens), planned)


def _step(model: nn.Module, live: LiveBytes, tokens: int) -> int:
    """Peak of the second step, with gradients cleared before it."""
    batch = torch.zeros(1, tokens, dtype=torch.long)
    for _ in range(2):
        gc.collect()
        live.reset()
        model(batch).sum().backward()
        model.zero_grad()
    return live.peak


def measure_sharding(world_size: int) -> tuple[int, int, int]:
    """Bytes at the peak of sharding a model that is on meta, of shards, of a unit.

    A sixty-fourth of the model, with real tensors.
    """
    with fake_world(world_size), LiveBytes() as live:
        with torch.device("meta"):
            model = Gpt(width=256)
        policy = ModuleWrapPolicy({TinyBlock})
        plan_ = plan(model, world_size=world_size, policy=policy)
        fully_shard(model, policy=policy, param_init_fn=_init)
        largest = max(unit.full_bytes for unit in plan_.units)
        return live.peak, plan_.parameter_bytes, largest


def _init(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    reset: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
    reset()


def measure(
    world_size: int, peers: Sequence[str], order: str
) -> dict[str, dict[str, int]]:
    """Every variant's peaks at one world size, in bytes."""
    found: dict[str, dict[str, int]] = {}
    for tokens in (SHORT, LONG):
        rows = {
            name: measure_peer(PEERS[name], world_size, tokens, order=order)
            for name in peers
        }
        for name, mode in OURS:
            rows[name] = measure_ours(world_size, tokens, prefetch=mode, order=order)
        for name, row in rows.items():
            cells = found.setdefault(name, {})
            cells[f"tokens_{tokens}"] = row.step
            if row.planned:
                cells["planned"] = row.planned
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables with the goals, write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory")
    add = parser.add_argument
    add("--worlds", type=int, nargs="+", default=[8], metavar="N", help="(8)")
    add("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="(both)")
    add("--only", nargs="*", choices=PEERS, default=list(PEERS), help="the peers")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # what FSDP1 says of itself
    say_versions()
    results: dict[str, object] = {"torch": torch.__version__}
    for world_size in options.worlds:
        found = {o: measure(world_size, options.only, o) for o in options.orders}
        for order, cells in found.items():
            _show(world_size, order, cells)
        peak, shards, unit = measure_sharding(world_size)
        say(
            f"sharding from meta: {(peak - shards) / unit:.2f} of the largest unit "
            "above the shards (goal: at most 1)"
        )
        results[str(world_size)] = {**found, "sharding": (peak, shards, unit)}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _show(world_size: int, order: str, found: dict[str, dict[str, int]]) -> None:
    rows = []
    for name, cells in found.items():
        short, planned = cells[f"tokens_{SHORT}"], cells.get("planned")
        plan_text = "" if planned is None else f"{planned / MIB:.0f}"
        exact = "" if planned is None else f"{(short - planned) / short:.2%}"
        numbers = (f"{cells[f'tokens_{n}'] / MIB:.0f}" for n in (SHORT, LONG))
        rows.append((name, *numbers, plan_text, exact))
    table(
        f"Peak MiB of forward and backward, world size {world_size}, {ORDERS[order]}; "
        "1.04 B in bf16, reduced in fp32 (goal: ours lowest; plan within 1 %)",
        ("", f"{SHORT} token", f"{LONG} tokens", "planned", "beyond plan"),
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
