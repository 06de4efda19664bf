"""Parity as a law of recipes and ranks, on whatever device the ranks compute.

Needs no Hypothesis. ``property_tests`` runs it over gloo and, where there are GPUs,
over NCCL.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tests.support.reference import (
    AnyInput,
    Clip,
    Loss,
    Optimize,
    assert_same_training,
    clip_any,
    loss_of,
    sgd,
    tolerance_at,
    train,
    train_reference,
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
    """Three steps of both have one result, by default as exact as sums are."""
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
    filled: list[Tensor] = [p for p in model.parameters() if p.numel()]
    nn.utils.clip_grad_norm_([*filled, torch.zeros(())], max_norm, norm_type)
