"""Lockstep: the two paths send the same, compute the same and save the same.

Both run the same plan through the same hooks, so nothing may tell them apart: not the
recorded collectives, not a loss, a gradient, a phase or a key of the state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from composable_fsdp import ShardingStrategy
from composable_fsdp.comm.collectives import record
from composable_fsdp.tree.traversal import _get_fsdp_handles
from property_tests.live import batches, examples
from tests.support.models import build, legal_units
from tests.support.place import _same
from tests.support.recipes import ModelRecipe
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    backward,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]

RECIPES = model_recipes(2, 2, FEATURES - {"replicate"})


def history(
    recipe: ModelRecipe, path: str, style: str, strategy: ShardingStrategy, rank: int
) -> dict[str, Any]:
    """Everything that two steps show from outside, on one path."""
    model = build(recipe)
    model = apply_units(
        model,
        legal_units(model, recipe.sharded),
        path=path,
        style=style,
        strategy=strategy,
    )
    optimizer = sgd(model.parameters())
    seen: dict[str, Any] = {"losses": [], "gradients": [], "states": [], "phases": []}
    with record() as calls:
        for step in range(2):
            x = wide_input(recipe.width)(step, rank)
            x.requires_grad_(recipe.seed % 2 == 1)
            loss = loss_of(model, x)
            if loss.requires_grad:
                backward(loss)
            handles = _get_fsdp_handles(model)
            grads = [p.grad for h in handles for p in h.leaves]
            seen["losses"].append(loss.detach())
            seen["gradients"].append([g if g is None else g.clone() for g in grads])
            seen["inputs"] = x.grad
            seen["phases"].append([h.phase.name for h in handles])
            optimizer.step()
            optimizer.zero_grad()
            seen["states"].append(model.state_dict())
    seen["calls"] = [str(call) for call in calls]
    seen["keys"] = [list(state) for state in seen["states"]]
    return seen


def check_lockstep(
    world: World, recipes: list[ModelRecipe], strategy: ShardingStrategy
) -> None:
    """The composable path by hand, and the wrapper by policy, have one history."""
    for recipe in recipes:
        ours = history(recipe, "composable", "manual", strategy, world.rank)
        wrapped = history(recipe, "wrapper", "auto", strategy, world.rank)

        assert world.all_equal(ours["calls"])
        apart = [key for key in ours if not _same(ours[key], wrapped[key])]
        assert apart == [], [(ours[key], wrapped[key]) for key in apart]


@pytest.mark.req("S1-34", "S1-36")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@examples(8)
@given(recipes=batches(RECIPES))
def test_both_paths_send_compute_and_save_the_same(
    ranks: RankCount,
    strategy: ShardingStrategy,
    world_size: int,
    recipes: list[ModelRecipe],
) -> None:
    """Calls, losses, gradients, phases and state dicts of two steps are equal."""
    ranks(world_size).run(check_lockstep, recipes, strategy)
