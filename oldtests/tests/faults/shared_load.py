"""A load with shared reads in which the last rank is lost; ``test_shared_loads``."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import LoadOptions, ShardingStrategy, fully_shard, load, save
from composable_fsdp.comm import collectives
from composable_fsdp.storage.native import NativeSource

LIMIT = 2.0
"""Seconds that a collective waits."""


def lose(how: str) -> None:
    """Let this rank be lost, before it has verified its part or as it sends it."""
    calls = 0

    def broadcast(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        real(*args, **options)

    if how == "killed before":
        NativeSource.prepare = lambda *_: os.kill(  # type: ignore[method-assign]  # a fault
            os.getpid(), signal.SIGKILL
        )
    real = collectives.broadcast
    mock.patch.object(collectives, "broadcast", broadcast).start()


def main(how: str) -> None:
    """Save, and load with shared reads."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(3)])
    for layer in model:
        fully_shard(layer, strategy=ShardingStrategy.NO_SHARD)
    save("run", model)
    if dist.get_rank() == dist.get_world_size() - 1:
        lose(how)
    begin = time.monotonic()
    try:
        load("run", model, options=LoadOptions(share=True))
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.write(f"after {time.monotonic() - begin:.1f} s\n")
    sys.stdout.flush()
    # A process group with a lost rank is not destroyed in order.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
