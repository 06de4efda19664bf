"""Host memory in which values wait between a file and their tensor, either way."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


@contextmanager
def paused_collection() -> Iterator[None]:
    """Let the garbage collector wait until the end of the block; also a decorator."""
    # None of a checkpoint's many records is garbage, and to look took 40 % of a load.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Of two threads in such a block, the first that entered switches on again.
        if was_on:
            gc.enable()


_ALIGNMENT = 64


class _PinnedMap(mmap.mmap):
    """Mapped memory that CUDA knows; no longer, before the memory is unmapped."""

    address = 0

    def __del__(self) -> None:
        # At the exit of the interpreter, CUDA may be gone.
        with suppress(Exception):
            if self.address:
                _cudart().cudaHostUnregister(self.address)


def host_buffer(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Return ``nbytes`` of host memory that no code has used."""
    # Private: shared memory, the default, would be seen by forked processes, too. In
    # pages of 4 KiB: to find those of 2 MiB took three times as long as the load.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    buffer = _PinnedMap(-1, max(nbytes, 1), flags=flags)
    # torch's own pinned memory is rounded up to a power of two.
    if pinned:
        _pin(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes]


def _pin(buffer: _PinnedMap) -> None:
    """Register the memory with CUDA until the memory is freed; warn if refused."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    # 1: pinned for all devices of the process.
    code = int(_cudart().cudaHostRegister(address, len(buffer), 1))
    if code:
        # Copies to pageable memory have the same values, and the call takes longer.
        warnings.warn(
            f"CUDA refused to pin {len(buffer)} bytes of host memory (error {code}): "
            "async_save copies more slowly. Free host memory, or raise the limit of "
            "locked memory (ulimit -l).",
            stacklevel=2,
        )
        return
    buffer.address = address


def _cudart() -> Any:
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no type


def parts_of(buffer: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return a part of ``buffer`` per size in bytes, each aligned for every dtype."""
    parts, at = [], 0
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += aligned(size)
    return parts


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory holds the values in order, on the host."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    # Lazily conjugated or negated tensors hold other values than they represent.
    return on_host and not tensor.is_conj() and not tensor.is_neg()


def note_write(tensor: Tensor) -> None:
    """Tell autograd that the memory was changed without an operator of torch."""
    # A tensor saved for backward before the load no longer has the saved values.
    if not tensor.is_inference():
        increment_version(tensor)


def aligned(nbytes: int) -> int:
    """Return the smallest multiple of the alignment that holds ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def cpus_per_rank() -> int:
    """Return how many threads of each rank of this machine can run at the same time."""
    # macOS does not tell on which processors the process may run.
    allowed = getattr(os, "sched_getaffinity", None)
    cpus = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    dist = torch.distributed
    there = dist.is_available() and dist.is_initialized()
    # The ranks of this machine, as far as known; else of the job.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return max(1, cpus // (ranks or (dist.get_world_size() if there else 1)))
