"""The private parts of torch.distributed that the test worlds need, and nothing else.

Checked with torch 2.13; torch 2.11 and 2.12 have the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed import distributed_c10d

__all__ = [
    "Store",
    "calls_issued",
    "default_group",
    "destroy_subgroups",
    "fake_store",
    "file_store",
    "hash_store",
    "tcp_store",
]


def file_store(path: Path, world_size: int) -> Store:
    """A rendezvous in a file: no port, nothing that a second pool could meet."""
    return FileStore(str(path), world_size)


def hash_store() -> Store:
    """A rendezvous of one process with itself."""
    return HashStore()


def tcp_store() -> TCPStore:
    """Host a rendezvous of other processes, at a free port of this machine."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def fake_store() -> Store:
    """Register the backend ``fake`` and return the store that it starts from."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def default_group() -> dist.ProcessGroup:
    """The default group of this process, which must exist."""
    group = dist.group.WORLD
    assert group is not None
    return group


def calls_issued() -> int | None:
    """How many calls the default group has issued; ``None`` where there is none."""
    if not dist.is_initialized():
        return None
    # The method exists in every version, its type stub in none.
    group: Any = default_group()
    return int(group._get_sequence_number_for_group())


def destroy_subgroups() -> None:
    """Leave every group but the default one; local, sends nothing."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
