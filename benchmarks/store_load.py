"""What the ranks of a large job ask of their one key-value store.

    python -m benchmarks.store_load                    # 1,024 ranks

The requests of a rank's first step are recorded from two real ranks. Then processes
with a connection per rank send as many as ``--ranks`` ranks would, to a real TCPStore:

    first step   all ranks at once: until the last rank is through
    a meeting    one rank is late, and the others look whether it has come

Server and clients share this machine's cores, so the times are upper bounds.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.tables import fixed, say, say_versions, table
from composable_fsdp import clip_grad_norm_, fully_shard
from composable_fsdp.comm import agreement, store_names
from tests.support.world import World, rank_pool, shutdown_pools

Requests = list[str]
"""Names of methods of the store, in order."""
PARTS = ("forward and backward", "clip_grad_norm_", "optimizer step")
SPAWN = multiprocessing.get_context("spawn")
PROCESSES = 4
LATE = 3.0
"""Seconds by which a rank is late in a meeting."""


class _Noting:
    """The store, which notes what it is asked."""

    def __init__(self, store: Any, noted: Requests) -> None:
        self._store, self._noted = store, noted

    def __getattr__(self, name: str) -> Any:
        self._noted.append(name)
        return getattr(self._store, name)


def first_step(world: World, units: int) -> list[Requests]:
    """The requests of the main thread of this rank, for each of ``PARTS``."""
    noted: Requests = []
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(units)))
    for each in model:
        fully_shard(each)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    store = agreement.key_value_store()
    # The watch asks for the store once, to connect; its requests are counted apart.
    noting = _Noting(store, noted)
    with mock.patch.object(agreement, "key_value_store", return_value=noting):
        ends = []
        model(torch.ones(2, 8)).sum().backward()
        ends.append(len(noted))
        clip_grad_norm_(model, 1.0)
        ends.append(len(noted))
        optimizer.step()
        parts = noted[: ends[0]], noted[ends[0] : ends[1]], noted[ends[1] :]
    return [[each for each in part if each != "clone"] for part in parts]


def play(store: Any, request: str, key: str) -> None:
    """Send one request of the kind that was recorded."""
    if request in ("append", "set"):
        getattr(store, request)(key, "1023 ")
    elif request == "add":
        store.add(f"{key}/count", 1)
    elif request == "get":
        # Of a key that exists: a real rank reads what it has written before.
        store.get("first/ready")
    elif request == "check":
        store.check([key])
    else:
        store.delete_key(f"{key}/absent")


def all_at_once(stores: Sequence[Any], requests: Requests) -> None:
    """Each store plays ``requests``; four threads have a request under way each."""

    def some(mine: Sequence[Any]) -> None:
        for number, request in enumerate(requests):
            for store in mine:
                play(store, request, f"first/{number}")

    threads = [Thread(target=some, args=(stores[i::4],)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def look(stores: Sequence[Any], pauses: Callable[[], Iterator[float]]) -> int:
    """Each store looks for ``LATE`` seconds, after each of ``pauses``."""
    end = time.monotonic() + LATE
    schedules = [pauses() for _ in stores]
    due = [(time.monotonic() + next(s), i) for i, s in enumerate(schedules)]
    heapq.heapify(due)
    visits = 0
    while due[0][0] < end:
        at, i = due[0]
        time.sleep(max(0.0, at - time.monotonic()))
        stores[i].check(["meeting/open"])
        visits += 1
        heapq.heapreplace(due, (time.monotonic() + next(schedules[i]), i))
    return visits


def serve(wire: Connection[Any, Any]) -> None:
    """Host a store until ``wire`` says something."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("first/ready", "1")
    wire.send(store.port)
    wire.recv()


def client(wire: Connection[Any, Any], port: int, ranks: int) -> None:
    """Be ``ranks`` ranks: answer each job with its seconds and its result."""
    stores = [
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        for _ in range(ranks)
    ]
    wire.send(None)
    while (job := wire.recv()) is not None:
        began = time.monotonic()
        result = job(stores)
        wire.send((time.monotonic() - began, result))


class Play:
    """A job: the requests of a step."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def __call__(self, stores: Sequence[Any]) -> int:
        all_at_once(stores, self.requests)
        return len(stores) * len(self.requests)


class Meet:
    """A job: wait in a meeting of ``ranks``."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __call__(self, stores: Sequence[Any]) -> int:
        return look(stores, lambda: store_names.pauses(self.ranks))


def cpu_seconds(process: int) -> float:
    """CPU time that ``process`` has used."""
    text = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")


def measure(ranks: int, jobs: dict[str, Any]) -> dict[str, tuple[float, int, float]]:
    """Per job: seconds, requests, and the part of a core that the server used."""
    here, there = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(there,))
    server.start()
    port, wires, clients = here.recv(), [], []
    for number in range(PROCESSES):
        wire, end = SPAWN.Pipe()
        share = len(range(number, ranks, PROCESSES))
        clients.append(SPAWN.Process(target=client, args=(end, port, share)))
        clients[-1].start()
        wires.append(wire)
    for wire in wires:
        wire.recv()
    assert server.pid is not None
    found = {}
    for name, job in jobs.items():
        used = cpu_seconds(server.pid)
        for wire in wires:
            wire.send(job)
        results = [wire.recv() for wire in wires]
        seconds = max(each for each, _ in results)
        used = cpu_seconds(server.pid) - used
        found[name] = seconds, sum(each for _, each in results), used / seconds
    for wire in (*wires, here):
        wire.send(None)
    for process in (*clients, server):
        process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, measure, and print both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.store_load")
    parser.add_argument("--ranks", type=int, default=1024, help="ranks (1024)")
    parser.add_argument("--units", type=int, default=100, help="units (100)")
    options = parser.parse_args(arguments)
    say_versions()
    try:
        recorded = rank_pool(2).run(first_step, options.units, timeout=300.0)
    finally:
        shutdown_pools()
    # The last rank to leave removes the keys, which is no part of the others' wait.
    least = [min(parts, key=len) for parts in zip(*recorded, strict=True)]
    table(
        f"Requests of a rank in the first step of {options.units} units",
        ("", "requests", ""),
        [
            (part, str(len(each)), ", ".join(f"{n} {k}" for k, n in kinds.items()))
            for part, each in zip(PARTS, least, strict=True)
            for kinds in [Counter(each)]
        ],
    )
    requests = [each for part in least for each in part]
    jobs = {"first step": Play(requests), "a meeting": Meet(options.ranks)}
    found = measure(options.ranks, jobs)
    table(
        f"{options.ranks} ranks at one store",
        ("", "seconds", "requests", "per second", "cores of the server"),
        [
            (
                name,
                *fixed([seconds], 2),
                str(n),
                *fixed([n / seconds], 0),
                f"{used:.2f}",
            )
            for name, (seconds, n, used) in found.items()
        ],
    )
    say("a meeting: visits while one rank is late, and the others wait for it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
