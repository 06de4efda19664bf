"""Saving and loading on two ranks: ours beside torch's DCP on FSDP2 and FSDP1.

Run from the repository's root; ``benchmarks/README.md`` says how to read the tables:

    python -m benchmarks.checkpoint                  # about 50 M parameters
    python -m benchmarks.checkpoint --many 500 5000  # and how many small ones scale
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import composable_fsdp as ours
from benchmarks.tables import say, table
from tests.support.pool import RankPool
from tests.support.world import World

NAMES = ("fsdp1 dcp", "fsdp2 dcp", "ours dcp", "ours native")
WIDTH = 1024


class Block(nn.Module):
    """Two linear layers and a norm: six parameters, ``4 * width ** 2`` elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to the same."""
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


@dataclass(frozen=True)
class Cost:
    """CPU and wall seconds of this rank, and bytes of tensors that collectives sent."""

    cpu: float
    wall: float
    sent: int


class _Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the bytes of floating point that collectives of c10d take.

    What ranks tell each other beside that are pickled objects: integers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                each
                for each in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(each, Tensor) and each.is_floating_point()
            ]
            self.nbytes += sum(each.nbytes for each in tensors)
        return func(*args, **(kwargs or {}))


def _shard(name: str, model: nn.Sequential, world: World) -> nn.Module:
    if name == "fsdp1 dcp":
        return FSDP1(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    if name == "fsdp2 dcp":
        mesh = init_device_mesh("cpu", (world.world_size,))
        for block in model:
            fsdp2_fully_shard(block, mesh=mesh)
        fsdp2_fully_shard(model, mesh=mesh)
        return model
    for block in model:
        ours.fully_shard(block)
    ours.fully_shard(model)
    return model


def _dcp_save(path: str, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    state, optim_state = get_state_dict(model, optim)
    state_dict_saver.save({"model": state, "optim": optim_state}, checkpoint_id=path)


def _dcp_load(path: str, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    state, optim_state = get_state_dict(model, optim)
    state_dict_loader.load({"model": state, "optim": optim_state}, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state, optim_state_dict=optim_state)


Way = Callable[[str, nn.Module, torch.optim.Optimizer], object]
WAYS: dict[str, tuple[Way, Way]] = {
    "fsdp1 dcp": (_dcp_save, _dcp_load),
    "fsdp2 dcp": (_dcp_save, _dcp_load),
    "ours dcp": (_dcp_save, _dcp_load),
    "ours native": (ours.save, ours.load),
}


@contextmanager
def _measured(costs: list[Cost], *, count: bool) -> Iterator[None]:
    """Add what the block costs this rank. Counting slows, so it has its own rounds."""
    dist.barrier()
    gc.collect()
    sent = _Sent()
    cpu, wall = time.process_time(), time.perf_counter()
    if count:
        with sent:
            yield
    else:
        yield
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    costs.append(Cost(cpu, wall, sent.nbytes))
    dist.barrier()


Turns = dict[str, list[Cost]]
"""Of each act the costs in three turns."""


def measure(
    world: World, name: str, blocks: int, width: int, folder: str
) -> tuple[Turns, bool]:
    """Costs on this rank of a save, a load and a reload, and if the values came back.

    A load is that of a restart, with a new optimizer; a reload goes back to a
    checkpoint in a run, where the optimizer has state. Of three turns the first pays
    what is made once (imports, groups), the second is timed, the third counts bytes.
    """
    torch.manual_seed(0)
    model = _shard(name, nn.Sequential(*(Block(width) for _ in range(blocks))), world)
    optim = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.randn(2, width)).sum().backward()
    optim.step()
    optim.zero_grad()
    save, load = WAYS[name]
    turns: Turns = {"save": [], "load": [], "reload": []}
    expected = [each.clone() for each in _values(model, optim)]
    same = True
    for turn in range(3):
        path = f"{folder}/{name.replace(' ', '-')}-{turn}"
        with _measured(turns["save"], count=turn == 2):
            save(path, model, optim)
        optim = torch.optim.AdamW(model.parameters(), foreach=True)
        for act in ("load", "reload"):
            with torch.no_grad():
                for value in _values(model, optim):
                    value.zero_()
            dist.barrier()
            if world.rank == 0:
                _forget(path)
            with _measured(turns[act], count=turn == 2):
                load(path, model, optim)
            found = _values(model, optim)
            same = same and all(map(torch.equal, found, expected))
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(path)
    return turns, same


def _forget(path: str) -> None:
    """Drop the files from the page cache, as a restart does.

    Else a load would be paid in part by who wrote through the cache. They are read
    once before, so that all find memory for the cache that was used before: a virtual
    machine may have to fetch it from its host, which costs more than reading.
    """
    for file in Path(path).rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as found:
                os.fsync(found.fileno())
                while found.read(1 << 22):
                    pass
                os.posix_fadvise(found.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _values(model: nn.Module, optim: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank holds of the parameters and their moments.

    Without empty tensors: where a rank has no elements of a parameter, a load leaves
    empty moments that a step does not make.
    """
    found: list[Tensor] = []
    for parameter in model.parameters():
        state = optim.state.get(parameter, {})
        held = parameter.detach(), state.get("exp_avg"), state.get("exp_avg_sq")
        found += [
            getattr(each, "_local_tensor", each) for each in held if each is not None
        ]
    return [each for each in found if each.numel()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint")
    add = parser.add_argument
    add("--blocks", type=int, default=12, help="blocks of 4.2 M parameters (12)")
    add("--many", type=int, nargs="*", default=[], help="numbers of small parameters")
    add("--rounds", type=int, default=5, help="saves and loads of each (5)")
    add("--only", nargs="+", choices=NAMES, default=NAMES)
    add("--folder", type=Path, help="where to write (the temporary directory)")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    say(f"torch {torch.__version__}, Python {platform.python_version()}, 2 ranks")
    results: dict[str, object] = {}
    sizes = [("large", options.blocks, WIDTH)]
    sizes += [(str(n), n // 6, 16) for n in options.many]
    with RankPool(2, "gloo") as pool:
        for label, blocks, width in sizes:
            results[label] = _compare(pool, blocks, width, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _compare(
    pool: RankPool, blocks: int, width: int, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """One table: each way's median, the ways taking turns round by round."""
    turns: dict[str, list[list[Turns]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.rounds):
            for name in options.only:
                # A round of its own each, so that the machine's moods fall on all.
                found = pool.run(
                    measure, name, blocks, width, folder, timeout=600, patience=60
                )
                if not all(same for _, same in found):
                    raise SystemExit(f"{name} did not load what it saved")
                turns[name].append([each for each, _ in found])
    parameters = 6 * blocks
    rows = {
        name: {
            key: value
            for act in ("save", "load", "reload")
            for key, value in _row(act, turns[name]).items()
        }
        for name in options.only
    }
    numel = blocks * (4 * width * width + 5 * width)
    table(
        f"{parameters} parameters, {numel / 1e6:.1f} M elements, AdamW, on 2 ranks: "
        f"seconds (CPU of both ranks), bytes sent, median of {options.rounds}",
        ("", *next(iter(rows.values()))),
        [
            (name, *(f"{v:.0f}" if "sent" in k else f"{v:.3f}" for k, v in row.items()))
            for name, row in rows.items()
        ],
    )
    if "ours native" in rows:
        for peer in ("fsdp1 dcp", "fsdp2 dcp"):
            if peer in rows:
                say(f"  {_ratio(peer, rows)}")
    return rows


def _row(act: str, rounds: list[list[Turns]]) -> dict[str, float]:
    timed = [[rank[act][1] for rank in ranks] for ranks in rounds]
    return {
        f"{act} cpu": statistics.median(sum(c.cpu for c in ranks) for ranks in timed),
        f"{act} wall": statistics.median(max(c.wall for c in ranks) for ranks in timed),
        f"{act} sent": max(ranks[0][act][2].sent for ranks in rounds),
    }


def _ratio(peer: str, rows: dict[str, dict[str, float]]) -> str:
    mine, theirs = rows["ours native"], rows[peer]
    parts = [
        f"{key} {theirs[key] / mine[key]:.2f}" for key in mine if "sent" not in key
    ]
    return f"{peer} / ours native: {', '.join(parts)}"


if __name__ == "__main__":
    raise SystemExit(main())
