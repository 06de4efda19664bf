"""What both test folders share: ranks, worlds of one process, Hypothesis profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from composable_fsdp.testing import world as worlds

try:
    from composable_fsdp.testing.strategies import register_profiles
except ImportError:
    pass
else:
    register_profiles()

# Two threads would change the order of sums, and ranks have one each.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], worlds.RankPool]]:
    """``ranks(2).run(check, ...)``: the long-lived pool of so many ranks."""
    yield worlds.rank_pool
    worlds.shutdown_pools()


@pytest.fixture
def one_rank() -> Iterator[worlds.World]:
    """A real process group of one rank, in the test's own process."""
    with worlds.single_rank_group() as world:
        yield world
