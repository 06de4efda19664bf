"""The environment variables by which frameworks know their ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.support.place import World


@contextmanager
def torchrun_variables(world: World, **more: str) -> Iterator[None]:
    """Show a framework the ranks of ``world``, as torchrun does."""
    told = {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(world.world_size),
        "MASTER_ADDR": "127.0.0.1",
        # Nobody listens: the process group of the pool is there already.
        "MASTER_PORT": "1",
        **more,
    }
    with mock.patch.dict(os.environ, told):
        yield
