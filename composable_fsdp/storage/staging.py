"""Host memory in which values wait between a file and their tensor."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_ALIGNMENT = 64
_CGROUP = Path("/sys/fs/cgroup")


def host_buffer(nbytes: int) -> Tensor:
    """Return ``nbytes`` of host memory that no code has used; not in small pages."""
    buffer = mmap.mmap(-1, max(nbytes, 1))
    # The kernel zeroes memory page by page at the first write: with pages of 2 MiB this
    # takes half of the time. A hint, which other systems lack.
    with suppress(AttributeError, OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes]


def parts_of(buffer: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return a part of ``buffer`` per size in bytes, each aligned for every dtype."""
    parts, at = [], 0
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += aligned(size)
    return parts


def aligned(nbytes: int) -> int:
    """Return the smallest multiple of the alignment that holds ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def fits_in_memory(nbytes: int) -> bool:
    """Return whether each rank of this machine may use ``nbytes`` more.

    At most half of the free memory is used. False, if the system does not tell.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or _ranks()
    return 2 * nbytes * ranks <= _free()


def _ranks() -> int:
    """Return the number of ranks, all of which may be on this machine."""
    dist = torch.distributed
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if there else 1


def _free() -> int:
    """Return the free memory of this machine, or of its container, in bytes."""
    free = 0
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        free = 1024 * int(text.split("MemAvailable:")[1].split()[0])
    # A container may have less memory than the machine shows.
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        free = min(free, limit - used)
    return free
