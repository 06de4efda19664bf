"""torch's own ``GradScaler`` over parameters that are cut over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs

from composable_fsdp import (
    ShardedGradScaler,
    ShardingStrategy,
    flat_parameters,
    fully_shard,
    replicate,
)
from tests.support.models import tiny_mlp
from tests.support.reference import backward, loss_of, wide_input
from tests.support.sharded import RankCount, message_of, one_to_three_ranks
from tests.support.world import World

x_of = wide_input(8)
Scaler = torch.amp.GradScaler


class Own(torch.amp.GradScaler):
    """A user's subclass that asks nobody either."""


def step_of(
    model: nn.Module, scaler: Any, world: World, *, flat: bool = False, **options: Any
) -> str:
    """What the second of two scaled steps raises, the first, or nothing."""
    parameters = flat_parameters(model) if flat else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, **options)
    for at in range(2):
        backward(scaler.scale(loss_of(model, x_of(at, world.rank))))
        before = [p.detach().clone() for p in model.parameters()]
        text = message_of(partial(scaler.step, optimizer))
        if text != "nothing was raised":
            assert all(map(torch.equal, before, model.parameters()))
            return text
        scaler.update()
        optimizer.zero_grad()
    return text


def check_refused(world: World) -> list[str]:
    found = []
    for kind in (Scaler, Own):
        for fused in (False, True):
            model, scaler = fully_shard(tiny_mlp()), kind("cpu")
            found.append(step_of(model, scaler, world, fused=fused))
    found.append(step_of(fully_shard(tiny_mlp()), Scaler("cpu"), world, flat=True))
    return found


@pytest.mark.req("P-13")
def test_a_scaler_that_asks_nobody_is_refused_at_the_first_step(
    ranks: RankCount,
) -> None:
    """By parameter, on every rank, before anything is stepped; subclasses as well."""
    first, second = ranks(2).run(check_refused)

    assert len(first) == 5
    for text, kind in zip(
        first, ["GradScaler"] * 2 + ["Own"] * 2 + ["GradScaler"], strict=True
    ):
        assert text.startswith(
            f"CompositionError: SGD steps under torch's {kind}, and of "
        )
        assert text.endswith(
            " each rank holds a part only: a rank that finds an infinity in its part "
            "would skip the step and lower its scale, while the others step. Use "
            "composable_fsdp.ShardedGradScaler, which takes the same arguments and "
            "decides for all ranks together."
        )
    assert "and of '0.weight' each" in first[0]
    assert "and of the flat parameter of '" in first[-1]
    assert second == first


def check_accepted(world: World) -> list[str]:
    unsharded = fully_shard(tiny_mlp(), strategy=ShardingStrategy.NO_SHARD)
    scalers = [
        (fully_shard(tiny_mlp()), ShardedGradScaler("cpu")),
        (fully_shard(tiny_mlp()), Torchs("cpu")),
        (fully_shard(tiny_mlp()), Scaler("cpu", enabled=False)),
        (unsharded, Scaler("cpu")),
        (replicate(tiny_mlp()), Scaler("cpu")),
    ]
    if world.world_size == 1:
        scalers.append((fully_shard(tiny_mlp()), Scaler("cpu")))
    return [step_of(model, scaler, world) for model, scaler in scalers]


@one_to_three_ranks
def test_scalers_that_decide_alike_pass(ranks: RankCount, world_size: int) -> None:
    """Ours, FSDP1's, one that is off, and any where each rank holds everything."""
    for texts in ranks(world_size).run(check_accepted):
        assert set(texts) == {"nothing was raised"}
