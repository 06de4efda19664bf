"""``sleep`` and ``wake`` of 16 GB beside pinned copies, for ``benchmarks.cuda``."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.device_steps import world
from benchmarks.tables import table
from composable_fsdp import fully_shard
from composable_fsdp.features import sleep, wake

UNITS = 16
WIDTH = {"cuda": 15812, "cpu": 64}
"""Of square matrices in float32: on a GPU a gigabyte each."""


def _copy(to: Tensor, source: Tensor) -> None:
    for _ in range(UNITS):
        to.copy_(source, non_blocking=True)


def measure(device: torch.device) -> None:
    """Print GB/s of both ways and of plain copies, the better of two runs."""
    with world("one", device):
        _measure(device)


def _measure(device: torch.device) -> None:
    width, on_gpu = WIDTH[device.type], device.type == "cuda"
    layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(UNITS)]
    model = fully_shard(nn.Sequential(*map(fully_shard, layers)))
    here = torch.ones(width, width, device=device)
    host = torch.empty(width, width, pin_memory=on_gpu)
    runs = {
        "sleep": partial(sleep, model),
        "wake": partial(wake, model),
        "copy to the host": partial(_copy, host, here),
        "copy back": partial(_copy, here, host),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in [*runs.items()] * 3:
        begin = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds[name].append(time.perf_counter() - begin)
    total = UNITS * here.nbytes / 1e9
    rates = [total / min(each[1:]) for each in seconds.values()]
    table(
        f"{total:.2g} GB, GB/s; the first sleep pins: {seconds['sleep'][0]:.1f} s",
        (*runs, "sleep / copy", "wake / copy"),
        [[f"{v:.2f}" for v in (*rates, rates[0] / rates[2], rates[1] / rates[3])]],
    )
