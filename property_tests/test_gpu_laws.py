"""The headline and parity on GPUs over NCCL, with as many ranks as there are GPUs.

The laws are the functions that run over gloo. ``make test-gpu`` runs them where
Hypothesis is installed; without it ``tests/gpu`` alone is collected, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given

from composable_fsdp import ShardingStrategy
from property_tests.live import batches, examples
from tests.gpu.counts import NEEDS_NCCL, RUNNABLE
from tests.runtime.orders import SUB1_SUB2, check_on_ranks
from tests.runtime.parity import check_clipped, check_parity
from tests.support.recipes import ModelRecipe
from tests.support.reference import STRATEGIES
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool

pytestmark = NEEDS_NCCL

UNMARKED = FEATURES - {"replicate"}
MARKED = FEATURES - {"shared", "tied"}
SAME_DTYPE = UNMARKED - {"dtypes"}


@pytest.fixture(scope="module", params=RUNNABLE)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks on NCCL, one per GPU."""
    with RankPool(request.param, "nccl") as ranks:
        yield ranks


@pytest.mark.req("S1-17", "S1-18", "S1-23")
@examples(15)
@given(recipes=batches(model_recipes(2, 2, UNMARKED)))
@example(recipes=[SUB1_SUB2])
def test_handle_order_is_that_of_modules(
    pool: RankPool, recipes: list[ModelRecipe]
) -> None:
    """Both paths, three styles, every rank; also after forward and backward."""
    pool.run(check_on_ranks, recipes)


@pytest.mark.req("S1-16", "S1-19")
@examples(5)
@given(recipes=batches(model_recipes(2, 2, MARKED)))
def test_replicate_subtrees_are_left_out(
    pool: RankPool, recipes: list[ModelRecipe]
) -> None:
    """A mark hides its whole subtree, also the ``fully_shard`` calls in it."""
    pool.run(check_on_ranks, recipes)


@pytest.mark.req("X-28", "D-13")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@examples(8)
@given(recipes=batches(model_recipes(2, 2, SAME_DTYPE)))
def test_training_equals_the_reference_closely(
    pool: RankPool, strategy: ShardingStrategy, recipes: list[ModelRecipe]
) -> None:
    """Losses and weights of SGD and AdamW, whatever the recipe."""
    pool.run(check_parity, recipes, strategy)


@pytest.mark.req("B-22")
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@examples(4)
@given(recipes=batches(model_recipes(2, 2, SAME_DTYPE)))
def test_clipping_equals_that_of_the_plain_model(
    pool: RankPool, norm_type: float, recipes: list[ModelRecipe]
) -> None:
    """The norm is the unsharded one, on every rank, and so are the clipped steps."""
    pool.run(check_clipped, recipes, norm_type)
