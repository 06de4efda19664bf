"""Bytes sent, copied and padded, beside FSDP1, FSDP2 and a bare prototype: exact.

Run from the repository's root; ``benchmarks/README.md`` says how to read the tables:

    python -m benchmarks.traffic                     # worlds 8 and 1024, under a minute

The model has 6.87 M float32 parameters and units of 0.79 M. Sent is what collectives
take, as they were called: all-gather in forward and again in backward (not for the
root), one reduce-scatter. Copied is what ops write beside what the plain model's do.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as FSDP1Policy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.floor import floor_shard
from benchmarks.models import Gpt
from benchmarks.tables import say, say_versions, table
from composable_fsdp import Block, ModuleWrapPolicy, fully_shard, plan
from composable_fsdp.comm.collectives import CallRecord, record
from composable_fsdp.planning.layout import ParameterSpec, row_block
from composable_fsdp.planning.partition import plan_regions
from composable_fsdp.tools.memory import Traffic
from tests.support.tiny import TinyBlock
from tests.support.world import fake_world

MODEL = {"layers": 8, "width": 256, "vocab": 1024}
GOAL_PADDING = 0.01
COPIES = ("copy_", "cat", "_to_copy", "clone", "chunk_cat", "split_with_sizes_copy")
"""Parts of the names of ops that write what they read; ``out=`` forms included."""


@dataclass(frozen=True)
class Bytes:
    """Of one steady step of one rank."""

    gathered: int
    reduced: int
    copied: int


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Sums the bytes of collectives' whole buffers, and those that copies write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # ditto
        self.gathered = self.reduced = self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` and count it."""
        if not all(issubclass(t, (Tensor, nn.Parameter)) for t in types) or any(
            hasattr(t, "__tensor_flatten__") for t in types
        ):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("c10d::"):
            given = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
            largest = max((t.nbytes for t in given), default=0)
            if "gather" in name:
                self.gathered += max(largest, _listed(args))
            elif "scatter" in name:
                self.reduced += max(largest, _listed(args))
        elif any(part in name.split("::")[1].split(".")[0] for part in COPIES):
            self.copied += _written(name, args, kwargs or {}, result)
        return result


def _listed(args: Any) -> int:
    """Bytes of the longer list of tensors that a collective was given."""
    lists = [x for x in pytree.tree_leaves(args, is_leaf=_is_tensors) if _is_tensors(x)]
    return max((sum(t.nbytes for t in x) for x in lists), default=0)


def _is_tensors(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(t, Tensor) for t in value)
    )


def _written(name: str, args: Any, kwargs: Any, result: Any) -> int:
    if "copy_" in name and "_copy" not in name.split("::")[1][:4]:
        target = args[0]  # of copy_ or of _foreach_copy_
    else:
        target = kwargs.get("out", result)
    tensors = [t for t in pytree.tree_leaves(target) if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors)


Shard = Callable[[Gpt, DeviceMesh], nn.Module]


def _plain(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    return model


def _fsdp1(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    return FSDP1(
        model,
        auto_wrap_policy=FSDP1Policy({TinyBlock}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _fsdp2(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    for block in (*model.blocks, model):
        fsdp2_fully_shard(block, mesh=mesh)
    return model


def _floor(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    floor_shard(model, model.blocks, compute=torch.float32, reduce=torch.float32)
    return model


def _ours(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, policy=ModuleWrapPolicy({TinyBlock}))
    return model


def _ours_by_element(model: Gpt, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, policy=ModuleWrapPolicy({TinyBlock}), block=Block.ELEMENT)
    return model


VARIANTS: dict[str, Shard] = {
    "plain": _plain,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "floor": _floor,
    "ours, Block.ELEMENT": _ours_by_element,
    "ours": _ours,
}


def measure(shard: Shard, world_size: int) -> tuple[Bytes, list[CallRecord]]:
    """Count a steady step of one variant; and what ours recorded of it."""
    with fake_world(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        model = shard(Gpt(**MODEL), mesh)
        batch = torch.zeros(1, 8, dtype=torch.long)
        for _ in range(3):
            model(batch).sum().backward()
            model.zero_grad()
        with Counting() as counted, record() as calls:
            model(batch).sum().backward()
    return Bytes(counted.gathered, counted.reduced, counted.copied), calls


def planned_traffic(world_size: int) -> Traffic:
    """What the plan says that ours sends."""
    policy = ModuleWrapPolicy({TinyBlock})
    return plan(Gpt(**MODEL), world_size=world_size, policy=policy).traffic


def recorded_traffic(calls: Sequence[CallRecord]) -> Traffic:
    """What ours sent, as its one seam to torch.distributed recorded it."""
    found = Traffic()
    for call in calls:
        found += Traffic(**{f"{call.op}_calls": 1, f"{call.op}_bytes": call.nbytes})
    return found


Shapes = dict[str, tuple[tuple[int, ...], ...]]


def _llama(h: int, f: int, kv: int) -> tuple[tuple[int, ...], ...]:
    return ((h,), (h,), (h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f))


def _experts(number: int, h: int, f: int) -> tuple[tuple[int, ...], ...]:
    return ((f, h), (f, h), (h, f)) * number


UNITS: Shapes = {
    "Llama-3-8B block": _llama(4096, 14336, 1024),
    "Llama-3-70B block": _llama(8192, 28672, 1024),
    "Llama-3-405B block": _llama(16384, 53248, 1024),
    # Experts are fused into one tensor: of rows, or of matrices of experts.
    "GPT-OSS-120B block": (
        *((2880,), (2880,), (4096, 2880), (512, 2880), (512, 2880), (2880, 4096)),
        *((128 * 5760, 2880), (128 * 2880, 2880), (128, 2880)),
    ),
    "GPT-OSS-120B block, row = expert": (
        *((2880,), (2880,), (4096, 2880), (512, 2880), (512, 2880), (2880, 4096)),
        *((128, 5760, 2880), (128, 2880, 2880), (128, 2880)),
    ),
    "DeepSeek-V3 block, 32 experts": (
        *((7168,), (7168,), (1536, 7168), (24576, 1536), (576, 7168), (32768, 512)),
        *((7168, 16384), (256, 7168), *_experts(33, 7168, 2048)),
    ),
}
"""Shapes of units, typed from public configurations."""


def padding(shapes: Sequence[tuple[int, ...]], world_size: int) -> float:
    """Padding over parameters, with row blocks, as the planner lays them out."""
    specs = [
        ParameterSpec((str(i),), shape, torch.bfloat16, True, row_block(shape))
        for i, shape in enumerate(shapes)
    ]
    regions = plan_regions(tuple(specs), world_size)
    numel = sum(region.numel for region in regions)
    return sum(region.padded_numel for region in regions) / numel - 1


def even_padding(shapes: Sequence[tuple[int, ...]], world_size: int) -> float:
    """The same if each parameter is cut evenly along dim 0, as FSDP2 does."""
    rows = [(s[0], max(torch.Size(s[1:]).numel(), 1)) for s in shapes]
    numel = sum(n * width for n, width in rows)
    padded = sum(-(-n // world_size) * world_size * width for n, width in rows)
    return padded / numel - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables with the goals, write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.traffic")
    add = parser.add_argument
    add("--worlds", type=int, nargs="+", default=[8, 1024], metavar="N")
    add("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024], metavar="N")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # what FSDP1 says of itself
    say_versions()
    results: dict[str, object] = {"torch": torch.__version__}
    for world_size in options.worlds:
        results[f"world_{world_size}"] = _show_traffic(world_size)
    results["padding"] = _show_padding(options.ranks)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _show_traffic(world_size: int) -> dict[str, dict[str, int]]:
    rows: dict[str, Bytes] = {}
    calls: list[CallRecord] = []
    for name, shard in VARIANTS.items():
        rows[name], calls = measure(shard, world_size)
    plain = rows.pop("plain").copied
    over = {n: {**asdict(r), "copied": r.copied - plain} for n, r in rows.items()}
    table(
        f"MB of a step, world size {world_size}, 6.87 M float32 parameters (copies over"
        " plain; goal: at most FSDP1's, under 0.4 of FSDP2's)",
        ("", "all-gather", "reduce-scatter", "copied", "copied / fsdp2"),
        [
            (
                name,
                *(f"{value / 1e6:.1f}" for value in row.values()),
                f"{row['copied'] / over['fsdp2']['copied']:.2f}",
            )
            for name, row in over.items()
        ],
    )
    equal = recorded_traffic(calls) == planned_traffic(world_size)
    # Of the last, whose blocks are the plan's.
    say(f"ours sent {'exactly what' if equal else 'OTHER THAN'} the plan says")
    return over


def _show_padding(ranks: Sequence[int]) -> dict[str, dict[int, float]]:
    found = {n: {r: padding(s, r) for r in ranks} for n, s in UNITS.items()}
    table(
        f"Padding with row blocks (goal under {GOAL_PADDING:.0%}); even: dim 0 cut "
        "evenly, as FSDP2 does",
        ("", *(f"{r} ranks" for r in ranks), f"even, {max(ranks)}"),
        [
            (
                name,
                *(f"{found[name][r]:.3%}" for r in ranks),
                f"{even_padding(shapes, max(ranks)):.1%}",
            )
            for name, shapes in UNITS.items()
        ],
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
