"""One order of handles, whatever the path, the style and the rank.

It is that of ``.modules()`` of an unsharded twin, never of our own traversal.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composable_fsdp import CustomPolicy, plan
from property_tests.live import batches, examples
from tests.runtime.orders import (
    SUB1_SUB2,
    check_on_ranks,
    check_orders,
    expected_order,
    mark_replicated,
    sharded_units,
)
from tests.support.models import build, module_at
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.sharded import RankCount
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import fake_world

WORLD_SIZES = (1, 2, 3, 4)

# A mark sits on a module, so on every place of it: marks and repeated modules are drawn
# apart, which keeps what is expected simple.
UNMARKED = FEATURES - {"replicate"}
MARKED = FEATURES - {"shared", "tied"}
TREES = model_recipes(3, 3, UNMARKED) | model_recipes(3, 3, MARKED)

# Found by the long profile: a unit that stands inside another unit as well, wrapped by
# hand in one of its two places.
LEAF = ModuleRecipe()
HOLDER = ModuleRecipe(children=(LEAF, LEAF, ModuleRecipe(kind="again")))
UNIT_IN_TWO_PLACES = ModelRecipe(
    ModuleRecipe(
        children=(ModuleRecipe(children=(LEAF, HOLDER, LEAF)), LEAF, LEAF),
    ),
    width=1,
    sharded=("block", "block.block", "block.block_1"),
)


@pytest.mark.req("S1-16", "S1-17", "S1-18", "S1-19", "S1-22", "S1-23", "S1-26")
@pytest.mark.req("S1-27", "S1-28", "S0-09", "S1-11", "S1-03", "S1-04")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@examples(12)
@given(recipes=batches(model_recipes(2, 2, UNMARKED) | model_recipes(2, 2, MARKED)))
@example(recipes=[SUB1_SUB2])
def test_handle_order_is_that_of_modules_on_live_ranks(
    ranks: RankCount, world_size: int, recipes: list[ModelRecipe]
) -> None:
    """Both paths, three styles, every rank: the order of the plain ``.modules()``. A
    mark hides its whole subtree, also the ``fully_shard`` calls in it."""
    ranks(world_size).run(check_on_ranks, recipes)


@pytest.mark.req("S1-16", "S1-17", "S1-18", "S1-19", "S1-23", "S0-09")
@examples(80)
@given(recipe=TREES, world_size=st.sampled_from(WORLD_SIZES))
@example(recipe=SUB1_SUB2, world_size=1)
@example(recipe=SUB1_SUB2, world_size=4)
@example(recipe=UNIT_IN_TWO_PLACES, world_size=3)
def test_handle_order_is_that_of_modules_in_every_fake_world(
    recipe: ModelRecipe, world_size: int
) -> None:
    """The same law without ranks, on larger trees, with ``replicate`` marks.

    The plain twin has no world size, so equal orders in all worlds need no test.
    """
    with fake_world(world_size, rank=world_size - 1):
        check_orders(recipe)


@pytest.mark.req("S1-17", "S1-18")
@examples(80)
@given(recipe=TREES)
def test_a_plan_lists_units_in_the_order_of_modules(recipe: ModelRecipe) -> None:
    """Planning alone, at any number of ranks, has the plain ``.modules()`` order."""
    units = sharded_units(recipe)
    expected = expected_order(recipe, units)
    model = build(recipe)
    mark_replicated(model, recipe)
    chosen = {id(module_at(model, path)) for path in units}
    policy = CustomPolicy(lambda module: id(module) in chosen)

    for world_size in (*WORLD_SIZES, 7, 64):
        planned = plan(model, world_size=world_size, policy=policy)
        assert [unit.fqn for unit in planned.units] == expected.units
