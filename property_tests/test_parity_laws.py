"""Parity: a sharded model trains as the plain one does, whatever the model.

Recipes bring what is odd: 0-d, zero-size and one-element parameters, frozen ones, three
dtypes in one unit, modules used at several places, tied parameters, empty units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import nn

from composable_fsdp import ShardingStrategy, clip_grad_norm_
from composable_fsdp.testing.models import build, legal_units
from composable_fsdp.testing.recipes import ModelRecipe
from composable_fsdp.testing.strategies import FEATURES, model_recipes
from composable_fsdp.testing.world import RankPool, World
from property_tests.live import batches, examples
from tests.runtime.reference import (
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    sgd,
    tolerance_at,
    train,
    train_reference,
    wide_input,
)

RankCount = Callable[[int], RankPool]

SAME_DTYPE = FEATURES - {"replicate", "dtypes"}


def check_parity(
    world: World, recipes: list[ModelRecipe], strategy: ShardingStrategy
) -> None:
    """Three steps of SGD with momentum and of AdamW equal the reference."""
    for recipe in recipes:
        for optimize in (sgd, adamw):
            model = build(recipe)
            plain = copy.deepcopy(model)
            units = legal_units(model, recipe.sharded)
            model = apply_units(model, units, strategy=strategy)
            make = wide_input(recipe.width)

            expected = train_reference(plain, world.world_size, make, optimize)
            losses = train(model, world.rank, make, optimize)

            assert_same_training(
                model,
                plain,
                losses,
                [step[world.rank] for step in expected],
                tolerance=tolerance_at(world.world_size),
            )
            assert world.all_equal(model.state_dict())


def clippable(model: nn.Module) -> list[torch.Tensor]:
    """What torch can clip: it warns of an empty list and refuses empty tensors."""
    filled: list[torch.Tensor] = [p for p in model.parameters() if p.numel()]
    return [*filled, torch.zeros(())]


def check_clipped(world: World, recipes: list[ModelRecipe], norm_type: float) -> None:
    """With clipping: equal norms, and weights but for the order of sums."""
    for recipe in recipes:
        train_clipped(world, recipe, norm_type)


def train_clipped(world: World, recipe: ModelRecipe, norm_type: float) -> None:
    """Three clipped steps of one recipe, beside the reference."""
    model = build(recipe)
    plain = copy.deepcopy(model)
    units = legal_units(model, recipe.sharded)
    model = apply_units(model, units, path="wrapper", style="auto")
    make = wide_input(recipe.width)
    theirs: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []

    def clip_plain(m: nn.Module) -> None:
        norm = torch.nn.utils.clip_grad_norm_(clippable(m), 0.1, norm_type)
        theirs.append(norm)

    def clip(m: nn.Module) -> None:
        ours.append(clip_grad_norm_(m, 0.1, norm_type))

    train_reference(plain, world.world_size, make, sgd, clip=clip_plain)
    train(model, world.rank, make, sgd, clip=clip)

    norms = torch.stack(ours), torch.stack(theirs)
    assert torch.allclose(*norms, rtol=1e-4, atol=1e-6), norms
    assert world.all_equal(ours)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-5), name


@pytest.mark.req("X-28", "D-13", "D-08", "B-03")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@examples(8)
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
@examples(6)
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
