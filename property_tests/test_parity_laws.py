"""Parity: a sharded model trains as the plain one does, whatever the model.

Recipes bring what is odd: 0-d, zero-size and one-element parameters, frozen ones, three
dtypes in one unit, modules used at several places, tied parameters, empty units.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from composable_fsdp import ShardingStrategy
from property_tests.live import batches, examples
from tests.runtime.parity import check_clipped, check_parity
from tests.support.recipes import ModelRecipe
from tests.support.reference import STRATEGIES
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool

RankCount = Callable[[int], RankPool]

SAME_DTYPE = FEATURES - {"replicate", "dtypes"}


@pytest.mark.req("X-28", "D-13", "D-08", "B-03")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@examples(5)
@given(recipes=batches(model_recipes(2, 2, FEATURES - {"replicate"})))
def test_training_equals_the_reference_bit_by_bit(
    ranks: RankCount,
    strategy: ShardingStrategy,
    world_size: int,
    recipes: list[ModelRecipe],
) -> None:
    """At one and two ranks, on CPU: equal bits, whatever the recipe."""
    ranks(world_size).run(check_parity, recipes, strategy)


@pytest.mark.req("X-28", "D-13")
@pytest.mark.parametrize("world_size", [3, 4])
@examples(4)
@given(recipes=batches(model_recipes(2, 2, SAME_DTYPE)))
def test_training_equals_the_reference_closely_on_more_ranks(
    ranks: RankCount, world_size: int, recipes: list[ModelRecipe]
) -> None:
    """At three and four ranks the order of a sum is the backend's."""
    ranks(world_size).run(check_parity, recipes, ShardingStrategy.FULL_SHARD)


@pytest.mark.req("B-22")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@examples(4)
@given(recipes=batches(model_recipes(2, 2, SAME_DTYPE)))
def test_clipping_equals_that_of_the_plain_model(
    ranks: RankCount, norm_type: float, world_size: int, recipes: list[ModelRecipe]
) -> None:
    """The norm is the unsharded one, on every rank, and so are the clipped steps."""
    ranks(world_size).run(check_clipped, recipes, norm_type)
