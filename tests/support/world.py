"""Ranks for tests, from the lightest to the heaviest.

`fake_world`: this process, collectives do nothing; for shapes, calls and plans.
`single_rank_group`: this process, a real group of one rank; for its numbers.
`rank_pool`: real processes, kept from test to test; ``ranks(2).run(check, 8)`` calls
``check(world, 8)`` on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.support import seam
from tests.support.collect import RankFailure
from tests.support.place import COLLECTIVE_TIMEOUT, World
from tests.support.pool import RankPool, backend, rank_pool, shutdown_pools

__all__ = [
    "RankFailure",
    "RankPool",
    "World",
    "backend",
    "fake_world",
    "rank_pool",
    "ranks",
    "shutdown_pools",
    "single_rank_group",
]

ranks = rank_pool


@contextmanager
def single_rank_group() -> Iterator[World]:
    """A gloo group of one rank in this process, as the default group.

    Raises: RuntimeError, if this process already has a default group.
    """
    with _default_group("gloo", seam.hash_store(), rank=0, world_size=1) as world:
        yield world


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[World]:
    """Be ``rank`` of ``world_size`` in this process; collectives return at once.

    Shapes and calls are those of the real world, the data that a collective should
    bring is not.

    Raises: RuntimeError, if this process already has a default group.
    """
    store = seam.fake_store()
    with _default_group("fake", store, rank=rank, world_size=world_size) as world:
        yield world


@contextmanager
def _default_group(
    backend: str, store: seam.Store, *, rank: int, world_size: int
) -> Iterator[World]:
    if dist.is_initialized():
        raise RuntimeError(
            f"this process already has a default group ({dist.get_backend()}, "
            f"{dist.get_world_size()} ranks); worlds do not nest, leave that one first."
        )
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        device = torch.device("cpu")
        yield World(rank, world_size, device, backend, seam.default_group())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
