"""A load of two replicas that share reads, beside a load in which each reads all.

    python -m benchmarks.shared_reads                     # 0.4 GB, 240 parameters

Two ranks with ``NO_SHARD`` on one machine. The checkpoint lies in the page cache, or in
a store that gives each process so many megabytes a second, as an object store would::

    alone     LoadOptions(share=False)
    shared    LoadOptions(share=True)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

import composable_fsdp as ours
from benchmarks.checkpoint import Block
from benchmarks.tables import say_versions, table
from composable_fsdp.storage.storages import FsspecStorage
from tests.support.pool import RankPool
from tests.support.world import World


class SlowStorage(FsspecStorage):
    """Local files that a process reads at ``rate`` bytes a second, whatever threads."""

    def __init__(self, rate: float) -> None:
        super().__init__("local")
        self.rate, self.nbytes = rate, 0
        self._lock = threading.Lock()

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)``; see ``Storage``.

        Args:
            name: the name.
            begin: the first byte.
            end: the byte after the last.
        """
        with self._lock:
            data = super().read(name, begin, end)
            self.nbytes += len(data)
            if self.rate:
                time.sleep(len(data) / self.rate)
        return data


def _given(storage: SlowStorage) -> SlowStorage:
    return storage


Found = dict[tuple[str, str], tuple[float, float, float]]


def turn(world: World, folder: str, blocks: int, width: int, rates: list[int]) -> Found:
    """Wall and CPU seconds and megabytes read, per place and way."""
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    ours.fully_shard(model, strategy=ours.ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    ours.save(f"{folder}/run", model, optimizer)
    found: Found = {}
    for rate in [None, *rates]:
        slow = SlowStorage((rate or 0) * 1e6)
        ours.storage.register_storage("slow", partial(_given, slow))
        place = "page cache" if rate is None else f"store, {rate or 'any'} MB/s"
        url = f"{folder}/run" if rate is None else f"slow://{folder}/run"
        for share in (False, True):
            world.barrier()
            slow.nbytes = 0
            wall, cpu = time.perf_counter(), time.process_time()
            ours.load(url, model, optimizer, options=ours.LoadOptions(share=share))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            way = "shared" if share else "alone"
            found[place, way] = wall, cpu, slow.nbytes / 1e6
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.shared_reads")
    add = parser.add_argument
    add("--blocks", type=int, default=8, help="blocks of six parameters (8)")
    add("--width", type=int, default=1024, help="of a block (1024)")
    add("--rounds", type=int, default=3, help="loads of each kind (3)")
    add("--rates", type=int, nargs="*", default=[0, 1000, 200], help="MB/s; 0: any")
    options = parser.parse_args(arguments)
    say_versions("")
    rows = []
    with tempfile.TemporaryDirectory() as folder, RankPool(2, "gloo") as pool:
        rounds = [
            pool.run(
                turn,
                f"{folder}/{at}",
                options.blocks,
                options.width,
                options.rates,
                timeout=600,
                patience=120,
            )
            for at in range(options.rounds)
        ]
        nbytes = sum(each.stat().st_size for each in Path(folder, "0/run").iterdir())
    for key in rounds[0][0]:
        wall = statistics.median(max(r[key][0] for r in ranks) for ranks in rounds)
        cpu = statistics.median(sum(r[key][1] for r in ranks) for ranks in rounds)
        read = max(r[key][2] for r in rounds[0])
        told = f"{read:.0f}" if read else ""
        rows.append((*key, f"{wall:.3f}", f"{cpu:.3f}", told))
    table(
        f"{nbytes / 1e9:.2f} GB, 2 replicas: median of {options.rounds}",
        ("", "", "wall s", "cpu s", "MB a rank"),
        rows,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
