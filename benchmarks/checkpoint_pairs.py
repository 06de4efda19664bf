"""Save, load and asynchronous save beside DCP, torch.save and the disk, in one run.

    python -m benchmarks.checkpoint_pairs                         # 2 GB, 240 parameters
    python -m benchmarks.checkpoint_pairs --blocks 1666 --width 32  # 10,000 parameters

Two ranks. The ways take turns in each round, each on a fresh model with AdamW::

    ours     composable_fsdp.save, load and async_save of a model of fully_shard
    dcp      torch.distributed.checkpoint on FSDP2, get_state_dict and set_state_dict
    torch    torch.save and torch.load of each rank's tensors, a file per rank, fsync
    dd       a file per rank of as many bytes, both at a time, with O_DIRECT

In a turn: save; load right after it, over the values that are there; a call of the
asynchronous save, and a second call. Wall seconds are those of the slower rank, CPU
seconds the sum of both, *memory* the most that a rank held beside what it had before.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

import composable_fsdp as ours
from benchmarks.checkpoint import Block, _dcp_load, _dcp_save, _shard, _values
from benchmarks.tables import say, say_versions, table
from tests.support.pool import RankPool
from tests.support.world import World

WAYS = ("ours", "dcp", "torch")
ACTS = ("save", "load", "async 1", "async 2")
NAMES = {"ours": "ours native", "dcp": "fsdp2 dcp", "torch": "ours native"}


class Cost(NamedTuple):
    """Wall and CPU seconds of a rank, and bytes held beside those before."""

    wall: float
    cpu: float
    memory: int


def _status(key: str) -> int:
    """A figure of the process in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{key}:")[1].split()[0])


@contextmanager
def measured(costs: dict[str, Cost], act: str) -> Iterator[None]:
    """Note the costs of the block on this rank."""
    gc.collect()
    # The peak of the process begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    costs[act] = Cost(wall, cpu, max(0, _status("VmHWM") - before))
    dist.barrier()


def turn(
    world: World, way: str, blocks: int, width: int, folder: str
) -> tuple[dict[str, Cost], bool, int]:
    """The costs of each act on this rank, whether the values came back, their bytes."""
    torch.manual_seed(world.rank)
    blocks_of = nn.Sequential(*(Block(width) for _ in range(blocks)))
    model = _shard(NAMES[way], blocks_of, world)
    # torch's foreach step over 10,000 DTensors takes minutes, and is not measured.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=way != "dcp")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    values = _values(model, optimizer)
    expected = [each.sum().item() for each in values]
    # A virtual machine may have to fetch memory from its host, which costs more than to
    # read the values: all ways find memory that was used before.
    torch.ones(sum(each.nbytes for each in values) * 5 // 4, dtype=torch.uint8)
    path = f"{folder}/{way}"
    costs: dict[str, Cost] = {}
    with measured(costs, "save"):
        _save(way, path, model, optimizer, values)
    with torch.no_grad():
        for value in values:
            value.zero_()
    with measured(costs, "load"):
        _load(way, path, model, optimizer, values)
    found = [each.sum().item() for each in _values(model, optimizer)]
    if way != "torch":
        # The thread of DCP's save would meet the barrier of ``measured`` in its group.
        beside = dist.new_group()
        for act in ACTS[2:]:
            with measured(costs, act):
                future = _begin(way, f"{path}-{act[-1]}", model, optimizer, beside)
            future.result()
            dist.barrier()
    dist.barrier()
    if not world.rank:
        for left in Path(folder).iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    nbytes = sum(each.nbytes for each in values)
    return costs, found == expected, nbytes


def _save(
    way: str, path: str, model: Any, optimizer: Any, values: Sequence[Tensor]
) -> None:
    if way == "ours":
        ours.save(path, model, optimizer)
    elif way == "dcp":
        _dcp_save(path, model, optimizer)
    else:
        os.makedirs(path, exist_ok=True)
        with open(f"{path}/{dist.get_rank()}.pt", "wb") as out:
            torch.save(list(values), out)
            out.flush()
            os.fsync(out.fileno())


def _load(
    way: str, path: str, model: Any, optimizer: Any, values: Sequence[Tensor]
) -> None:
    if way == "ours":
        ours.load(path, model, optimizer)
    elif way == "dcp":
        _dcp_load(path, model, optimizer)
    else:
        saved = torch.load(f"{path}/{dist.get_rank()}.pt")
        for into, value in zip(values, saved, strict=True):
            into.detach().copy_(value)


def _begin(way: str, path: str, model: Any, optimizer: Any, beside: Any) -> Any:
    if way == "ours":
        return ours.async_save(path, model, optimizer)
    state, optim_state = get_state_dict(model, optimizer)
    both = {"model": state, "optim": optim_state}
    return state_dict_saver.async_save(both, checkpoint_id=path, process_group=beside)


def disk(nbytes: int, folder: str) -> dict[str, float]:
    """Wall seconds in which two dd write, and read, so many bytes each."""
    count = f"count={max(1, nbytes >> 22)}"
    files = [f"{folder}/dd-{i}" for i in range(2)]
    writes = [["if=/dev/zero", f"of={f}", "oflag=direct", "conv=fsync"] for f in files]
    reads = [[f"if={f}", "of=/dev/null", "iflag=direct"] for f in files]
    found = {}
    for act, each in (("save", writes), ("load", reads)):
        begin = time.perf_counter()
        running = [
            subprocess.Popen(["dd", *one, "bs=4M", count], stderr=subprocess.DEVNULL)
            for one in each
        ]
        if any(one.wait() for one in running):
            raise SystemExit("dd failed: the file system has no O_DIRECT")
        found[act] = time.perf_counter() - begin
    for file in files:
        os.unlink(file)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint_pairs")
    add = parser.add_argument
    add("--blocks", type=int, default=40, help="blocks of six parameters (40)")
    add("--width", type=int, default=1024, help="of a block (1024)")
    add("--rounds", type=int, default=3, help="turns of each way (3)")
    add("--folder", type=Path, help="where to write (the temporary directory)")
    options = parser.parse_args(arguments)
    say_versions(f", load {os.getloadavg()[0]:.1f} before")
    costs: dict[tuple[str, str], list[Cost]] = {}
    walls: dict[str, list[float]] = {"save": [], "load": []}
    nbytes = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for at in range(options.rounds):
            # The order turns, so that no way always follows the same other.
            for way in (*WAYS[at % 3 :], *WAYS[: at % 3]):
                with RankPool(2, "gloo") as pool:
                    found = pool.run(
                        turn,
                        way,
                        options.blocks,
                        options.width,
                        folder,
                        timeout=600,
                        patience=120,
                    )
                if not all(same for _, same, _ in found):
                    raise SystemExit(f"{way} did not load what it saved")
                nbytes = max(each for _, _, each in found)
                for act in found[0][0]:
                    costs.setdefault((way, act), []).append(_both(found, act))
            for act, seconds in disk(nbytes, folder).items():
                walls[act].append(seconds)
    _print(options, nbytes, costs, walls)
    return 0


def _both(found: Sequence[tuple[dict[str, Cost], bool, int]], act: str) -> Cost:
    """The cost of both ranks."""
    ranks = [each[act] for each, _, _ in found]
    return Cost(
        max(r.wall for r in ranks),
        sum(r.cpu for r in ranks),
        max(r.memory for r in ranks),
    )


def _print(
    options: argparse.Namespace,
    nbytes: int,
    costs: dict[tuple[str, str], list[Cost]],
    walls: dict[str, list[float]],
) -> None:
    """Print the medians, and the ratio of the peers to ours."""
    middle: Callable[[list[float]], float] = statistics.median
    rows = []
    for (way, act), each in costs.items():
        wall, cpu = middle([c.wall for c in each]), middle([c.cpu for c in each])
        memory = middle([c.memory / 1e6 for c in each])
        rows.append((f"{way} {act}", f"{wall:.3f}", f"{cpu:.3f}", f"{memory:.0f}"))
    rows += [(f"dd {a}", f"{middle(w):.3f}", "", "") for a, w in walls.items()]
    table(
        f"{6 * options.blocks} parameters, AdamW, {2 * nbytes / 1e9:.2f} GB on 2 "
        f"ranks: median of {options.rounds}",
        ("", "wall s", "cpu s", "memory MB"),
        sorted(rows),
    )
    for act in ACTS:
        mine, theirs = costs["ours", act], costs["dcp", act]
        wall = middle([t.wall / m.wall for m, t in zip(mine, theirs, strict=True)])
        cpu = middle([t.cpu / m.cpu for m, t in zip(mine, theirs, strict=True)])
        say(f"  dcp / ours, {act}: wall {wall:.2f}, cpu {cpu:.2f} (median of rounds)")


if __name__ == "__main__":
    raise SystemExit(main())
