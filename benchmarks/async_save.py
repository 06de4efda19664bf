"""How long ``async_save`` keeps the caller, beside a copy of the same bytes.

    python -m benchmarks.async_save                    # 2 GB in 240 parameters
    python -m benchmarks.async_save --blocks 1666 --width 32    # 10,000 parameters
    python -m benchmarks.async_save --device cuda      # beside copies to pinned memory

One process: the call has no other rank to wait for. In each round come a copy of all
values into memory that is in use already, by ``memcpy`` (of CUDA tensors: into pinned
memory, and a wait), and the call.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.checkpoint import Block, _values
from benchmarks.tables import fixed, say, say_versions, table
from composable_fsdp import async_save, fully_shard
from composable_fsdp.storage import free_save_memory


def seconds(act: Callable[[], object]) -> float:
    """Wall seconds of ``act``."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def trained(
    blocks: int, width: int, device: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded model and an AdamW that has stepped."""
    model = torch.nn.Sequential(*(Block(width) for _ in range(blocks))).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def copying(sources: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A function that copies all values into host memory that is in use already."""
    on_gpu = any(each.is_cuda for each in sources)
    copies = [torch.zeros_like(each, device="cpu") for each in sources]
    if on_gpu:
        copies = [each.pin_memory() for each in copies]
    pairs = [(into, each) for into, each in zip(copies, sources, strict=True)]

    def memcpy() -> None:
        for into, source in pairs:
            if on_gpu:
                into.copy_(source.detach(), non_blocking=True)
            else:
                ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
        if on_gpu:
            torch.cuda.synchronize()

    return memcpy


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.async_save")
    add = parser.add_argument
    add("--blocks", type=int, default=40, help="blocks of six parameters (40)")
    add("--width", type=int, default=1024, help="of a block (1024)")
    add("--rounds", type=int, default=9, help="calls after the first (9)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--folder", type=Path, help="where to write (the temporary directory)")
    options = parser.parse_args(arguments)
    say_versions()
    # A store and no address: no port is taken.
    backend = {"cpu": "gloo", "cuda": "nccl"}[options.device]
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    model, optimizer = trained(options.blocks, options.width, options.device)
    sources = _values(model, optimizer)
    total = sum(each.nbytes for each in sources)
    memcpy = copying(sources)
    copied, called = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for at in range(options.rounds + 1):
            gc.collect()
            copied.append(seconds(memcpy))
            path, begin = Path(folder) / f"step-{at}", time.perf_counter()
            future = async_save(path, model, optimizer)
            called.append(time.perf_counter() - begin)
            future.result()
            shutil.rmtree(path)
    held = free_save_memory(model)
    dist.destroy_process_group()
    copy, call = statistics.median(copied[1:]), statistics.median(called[1:])
    table(
        f"{len(sources) // 3} parameters, AdamW, {total / 1e9:.2f} GB: seconds, median "
        f"of {options.rounds}",
        ("", "first", "later", "least"),
        [
            ("memcpy", *fixed((copied[0], copy, min(copied)), 3)),
            ("async_save", *fixed((called[0], call, min(called)), 3)),
        ],
    )
    least = min(called) / min(copied)
    say(f"  the call / memcpy: {call / copy:.2f} (least {least:.2f})")
    say(f"  memory held: {held / total:.4f} of the values")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
