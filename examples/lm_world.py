"""The processes that train together, and the device of each."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class World:
    """This process among the others, and where it computes."""

    rank: int
    size: int
    device: torch.device

    def mean(self, value: float) -> float:
        """Mean over ranks. Collective: one all-reduce."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def highest(self, value: float) -> float:
        """Largest over ranks, NaN if there is one. Collective: one all-gather."""
        values: list[float] = [0.0] * self.size
        dist.all_gather_object(values, value)
        return max(values, key=lambda v: (v != v, v))

    def say(self, text: str = "") -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def joined_world() -> Iterator[World]:
    """Join torchrun's ranks, or be a world of one without it."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    # Without torchrun there is nobody to meet: any free port will do.
    where = "env://" if "RANK" in os.environ else "tcp://localhost:0"
    store, rank, size = next(rendezvous(where, rank, size))
    # torchrun's store outlives its workers: after a restart, gloo would find the
    # addresses of ranks that are dead, and wait for them.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, device)
    finally:
        # The sharded model lives in reference cycles and holds the process group, whose
        # threads would outlive main and now and then abort the process at exit.
        gc.collect()
        dist.destroy_process_group()
