"""Parity as a law of recipes and ranks, on whatever device the ranks compute.

Needs no Hypothesis. ``property_tests`` runs it over gloo and, where there are GPUs,
over NCCL.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy
from tests.support.models import build, legal_units
from tests.support.recipes import ModelRecipe
from tests.support.reference import (
    AnyInput,
    Input,
    Loss,
    Optimize,
    adamw,
    apply_units,
    assert_same_training,
    clip_any,
    loss_of,
    sgd,
    tolerance_at,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import World


def inputs_on(world: World, recipe: ModelRecipe) -> Input:
    """The inputs of a recipe's model, where the ranks compute."""
    make = wide_input(recipe.width)

    def moved(step: int, rank: int) -> Tensor:
        return make(step, rank).to(world.device)

    return moved


def tolerance_of(world: World) -> float:
    """Bit by bit on few CPU ranks; a GPU sums in an order of its own."""
    return tolerance_at(world.world_size) if world.device.type == "cpu" else 1e-4


def trains_as(
    world: World,
    model: nn.Module,
    plain: nn.Module,
    make: AnyInput,
    optimize: Optimize = sgd,
    *,
    tolerance: float | None = None,
    loss_of: Loss = loss_of,
) -> None:
    """Three steps of both have one result, by default as exact as sums are."""
    expected = train_reference(plain, world.world_size, make, optimize, loss_of=loss_of)
    losses = train(model, world.rank, make, optimize, loss_of=loss_of)
    mine = [step[world.rank] for step in expected]
    if tolerance is None:
        tolerance = tolerance_at(world.world_size)
    assert_same_training(model, plain, losses, mine, tolerance=tolerance)


def check_parity(
    world: World, recipes: list[ModelRecipe], strategy: ShardingStrategy
) -> None:
    """Three steps of SGD with momentum and of AdamW equal the reference."""
    for recipe in recipes:
        for optimize in (sgd, adamw):
            model = build(recipe).to(world.device)
            plain = copy.deepcopy(model)
            units = legal_units(model, recipe.sharded)
            model = apply_units(model, units, strategy=strategy)
            make = inputs_on(world, recipe)

            tolerance = tolerance_of(world)
            trains_as(world, model, plain, make, optimize, tolerance=tolerance)
            assert world.all_equal(model.state_dict())


def clippable(model: nn.Module) -> list[Tensor]:
    """What torch can clip: it warns of an empty list and refuses empty tensors."""
    filled: list[Tensor] = [p for p in model.parameters() if p.numel()]
    return [*filled, torch.zeros(())]


def check_clipped(world: World, recipes: list[ModelRecipe], norm_type: float) -> None:
    """With clipping: equal norms, and weights but for the order of sums."""
    for recipe in recipes:
        train_clipped(world, recipe, norm_type)


def train_clipped(world: World, recipe: ModelRecipe, norm_type: float) -> None:
    """Three clipped steps of one recipe, beside the reference."""
    model = build(recipe).to(world.device)
    plain = copy.deepcopy(model)
    units = legal_units(model, recipe.sharded)
    model = apply_units(model, units, path="wrapper", style="auto")
    make = inputs_on(world, recipe)
    theirs: list[Tensor] = []
    ours: list[Tensor] = []

    def clip_plain(m: nn.Module) -> None:
        norm = torch.nn.utils.clip_grad_norm_(clippable(m), 0.1, norm_type)
        theirs.append(norm.cpu())

    def clip(m: nn.Module) -> None:
        ours.append(clip_any(m, 0.1, norm_type).cpu())

    train_reference(plain, world.world_size, make, sgd, clip=clip_plain)
    train(model, world.rank, make, sgd, clip=clip)

    norms = torch.stack(ours), torch.stack(theirs)
    assert torch.allclose(*norms, rtol=1e-4, atol=1e-6), norms
    assert world.all_equal(ours)
    atol = max(1e-5, tolerance_of(world))
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=atol), name
