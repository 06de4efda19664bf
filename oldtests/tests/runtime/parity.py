"""Parity as a law of recipes and ranks, on whatever device the ranks compute.

Needs no Hypothesis. ``property_tests`` runs it over gloo and, where there are GPUs,
over NCCL.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy
from tests.support.models import build, legal_units
from tests.support.recipes import ModelRecipe
from tests.support.reference import (
    AnyInput,
    Clip,
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


def trains_as(
    world: World,
    model: nn.Module,
    plain: nn.Module,
    make: AnyInput,
    optimize: Optimize = sgd,
    *,
    tolerance: float | None = None,
    loss_of: Loss = loss_of,
    clip: float | None = None,
    norm_type: float = 2.0,
) -> None:
    """Three steps of both have one result, by default as exact as sums are.

    ``clip``: the norm to which gradients are clipped.
    """
    ours: Clip | None = None
    theirs: Clip | None = None
    if clip is not None:
        ours = partial(clip_any, max_norm=clip, norm_type=norm_type)
        theirs = partial(clip_plain, max_norm=clip, norm_type=norm_type)
    size = world.world_size
    expected = train_reference(
        plain, size, make, optimize, loss_of=loss_of, clip=theirs
    )
    losses = train(model, world.rank, make, optimize, loss_of=loss_of, clip=ours)
    mine = [step[world.rank] for step in expected]
    if tolerance is None:
        tolerance = tolerance_at(size)
    assert_same_training(model, plain, losses, mine, tolerance=tolerance)


def clip_plain(model: nn.Module, max_norm: float, norm_type: float) -> None:
    """Clip what torch can: it warns of an empty list and refuses empty tensors."""
    filled: list[Tensor] = [p for p in model.parameters() if p.numel()]
    nn.utils.clip_grad_norm_([*filled, torch.zeros(())], max_norm, norm_type)


def on_device(device: torch.device, make: Input, step: int, rank: int) -> Tensor:
    """The input of (step, rank), where the ranks compute."""
    return make(step, rank).to(device)


def check_parity(
    world: World,
    recipes: list[ModelRecipe],
    strategy: ShardingStrategy,
    clip: float | None = None,
    norm_type: float = 2.0,
) -> None:
    """Three steps of SGD with momentum and of AdamW equal the reference."""
    exact = world.device.type == "cpu" and clip is None
    tolerance = tolerance_at(world.world_size) if exact else 1e-4
    for recipe in recipes:
        for optimize in (sgd, adamw):
            model = build(recipe).to(world.device)
            plain = copy.deepcopy(model)
            units = legal_units(model, recipe.sharded)
            model = apply_units(model, units, strategy=strategy)

            trains_as(
                world,
                model,
                plain,
                partial(on_device, world.device, wide_input(recipe.width)),
                optimize,
                tolerance=tolerance,
                clip=clip,
                norm_type=norm_type,
            )
            assert world.all_equal(model.state_dict())
