"""Round trips: what was saved of some units and ranks is loaded into others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch import nn

from composable_fsdp import (
    ShardingStrategy,
    optim_state_dict,
    optim_state_dict_to_load,
)
from property_tests.live import batches, examples
from tests.support.models import build, legal_units
from tests.support.place import _same
from tests.support.recipes import ODD, ModelRecipe
from tests.support.reference import (
    STRATEGIES,
    adamw,
    apply_units,
    loss_of,
    wide_input,
)
from tests.support.sharded import RankCount
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import World

RECIPES = model_recipes(2, 2, FEATURES - {"replicate"})


def sharded(
    recipe: ModelRecipe, path: str, strategy: ShardingStrategy, *, whole: bool = False
) -> nn.Module:
    """The recipe's model with its units; ``whole`` leaves only the root."""
    model = build(recipe)
    units = () if whole else legal_units(model, recipe.sharded)
    return apply_units(model, units, path=path, strategy=strategy)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: ModelRecipe, at: range
) -> None:
    rank = torch.distributed.get_rank()
    for step in at:
        loss = loss_of(model, wide_input(recipe.width)(step, rank))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def save_all(
    world: World, recipes: list[ModelRecipe], strategy: ShardingStrategy
) -> list[Any]:
    """Train a step on the wrapper's path; full weights and optimizer state."""
    saved = []
    for recipe in recipes:
        model = sharded(recipe, "wrapper", strategy)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, recipe, range(1))
        state = optim_state_dict(model, optimizer)
        shapes = {name: p.shape for name, p in build(recipe).named_parameters()}
        assert state["state"].keys() <= shapes.keys()
        for name, values in state["state"].items():
            assert values["exp_avg"].shape == shapes[name]
        saved.append([dict(model.state_dict()), state])
        assert world.all_equal(saved[-1])
    return saved


def load_all(
    world: World,
    recipes: list[ModelRecipe],
    strategy: ShardingStrategy,
    saved: list[Any],
) -> None:
    """Load into one unit on the other path, whose optimizer has a state or none."""
    for trained, (recipe, (weights, state)) in enumerate(
        zip(recipes, saved, strict=True)
    ):
        model = sharded(recipe, "composable", strategy, whole=True)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, recipe, range(trained))
        model.load_state_dict(weights)
        optim_state_dict_to_load(model, optimizer, state, load_directly=True)

        assert _same(dict(model.state_dict()), weights)
        assert _same(optim_state_dict(model, optimizer), state)


@pytest.mark.req("S1-09", "S1-15", "S1-34", "X-28")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 2)])
@examples(4)
@given(recipes=batches(RECIPES))
@example(recipes=[ODD])
def test_other_units_another_path_and_number_of_ranks_load_the_same_bits(
    ranks: RankCount,
    strategy: ShardingStrategy,
    before: int,
    after: int,
    recipes: list[ModelRecipe],
) -> None:
    """Weights and optimizer state pass between models unchanged."""
    saved = ranks(before).run(save_all, recipes, strategy)[0]

    ranks(after).run(load_all, recipes, strategy, saved)
