"""The headline and parity on GPUs over NCCL, with as many ranks as there are GPUs.

The laws are the functions that run over gloo. ``make test-gpu`` runs them where
Hypothesis is installed; without it ``tests/gpu`` alone is collected, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp import ShardingStrategy
from property_tests.live import batches, examples
from tests.gpu.counts import NEEDS_NCCL, RUNNABLE
from tests.runtime.orders import check_on_ranks
from tests.runtime.parity import check_parity
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool

pytestmark = NEEDS_NCCL

FULL = ShardingStrategy.FULL_SHARD
SAME_DTYPE = FEATURES - {"replicate", "dtypes"}


@pytest.fixture(scope="module", params=RUNNABLE)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks on NCCL, one per GPU."""
    with RankPool(request.param, "nccl") as ranks:
        yield ranks


LAWS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "order": (check_on_ranks, FEATURES - {"replicate"}, ()),
    "marked": (check_on_ranks, FEATURES - {"shared", "tied"}, ()),
    "full": (check_parity, SAME_DTYPE, (FULL,)),
    "zero2": (check_parity, SAME_DTYPE, (ShardingStrategy.SHARD_GRAD_OP,)),
    "whole": (check_parity, SAME_DTYPE, (ShardingStrategy.NO_SHARD,)),
    "clipped": (check_parity, SAME_DTYPE, (FULL, 0.1)),
    "clipped by the largest": (check_parity, SAME_DTYPE, (FULL, 0.1, float("inf"))),
}
"""What runs on each rank, what recipes may hold, and further arguments."""


@pytest.mark.parametrize("name", LAWS)
@examples(8)
@given(data=st.data())
def test_the_laws_of_gloo_hold_on_gpus(
    pool: RankPool, name: str, data: st.DataObject
) -> None:
    """Order of handles, training and clipping, whatever the recipe."""
    check, features, more = LAWS[name]
    recipes = data.draw(batches(model_recipes(2, 2, features)))

    pool.run(check, recipes, *more)
