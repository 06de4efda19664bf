"""The decorator that runs the body of a test on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.on_ranks import on_ranks
from tests.support.world import RankFailure, RankPool, World, rank_pool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """A pool of the module's own, as the tests of GPUs have."""
    with RankPool(2, "gloo") as pool:
        yield pool


@on_ranks(2)
def test_the_body_runs_in_a_group_of_so_many_ranks(world: World) -> None:
    """Sums over the group are those of two ranks."""
    total = torch.ones(1)
    dist.all_reduce(total)

    assert total.item() == world.world_size == 2


@on_ranks(1, 3)
@pytest.mark.parametrize("add", [10, 20])
def test_parameters_and_fixtures_are_arguments(
    world: World, tmp_path: Path, world_size: int, add: int
) -> None:
    """Every rank has the same ones; the size may be asked for like any other."""
    assert world.world_size == world_size in (1, 3)
    assert world.all_equal(str(tmp_path))
    assert tmp_path.is_dir()
    assert add in (10, 20)


@on_ranks()
def test_without_sizes_the_ranks_are_those_of_the_fixture(world: World) -> None:
    """``pool`` of this module has two."""
    assert world.world_size == 2


@on_ranks(2)
def fails_on_the_last_rank(world: World, limit: int) -> None:
    assert world.rank < limit, "too far"


def test_a_body_that_fails_on_a_rank_fails_the_test() -> None:
    """The error names the test, the rank, and its local values."""
    with pytest.raises(RankFailure) as caught:
        fails_on_the_last_rank(ranks=rank_pool, limit=1)

    assert list(caught.value.errors) == [1]
    assert "fails_on_the_last_rank failed on 1 of 2 ranks" in str(caught.value)
    assert "limit = 1" in caught.value.errors[1]
