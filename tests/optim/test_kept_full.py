"""Full parameters that are kept over a step of an optimizer, whatever its kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    ShardingStrategy,
    no_sync,
    reshard,
    set_reshard_after_backward,
    unshard,
)
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.optim.models import INPUT, Mixed, mixed, train_plain
from tests.optim.test_every_optimizer import made
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    backward,
    differences,
    loss_of,
)
from tests.support.sharded import message_of
from tests.support.world import World

STALE = "PhaseError: The shards of fully sharded module "


KERNELS = [
    ("SGD momentum", "one"),
    ("Adagrad", "one"),
    ("AdamW", "foreach"),
    ("ASGD", "foreach"),
    ("Adam amsgrad", "fused"),
    ("SGD", "fused"),
]
"""Optimizers that write tensor by tensor, by ``foreach`` and by fused kernels."""


@pytest.mark.req("P-02")
@on_ranks(2)
def test_no_step_on_weights_that_are_kept_full_passes_unnoticed(world: World) -> None:
    """Refused; and after the way out, reshard, training is the plain model's."""
    for name, way in KERNELS:
        model, plain = mixed("wrapper"), Mixed()
        ours, reference = made(model, name, way), made(plain, name, way)
        set_reshard_after_backward(model, False)
        for at in range(2):
            backward(loss_of(model, INPUT(at, world.rank)))
            ours.step()
            ours.zero_grad()
            text = message_of(partial(model, INPUT(at, world.rank)))
            assert text.startswith(STALE), (name, way, text)
            for state in _get_fsdp_states(model):
                reshard(state.module)
        train_plain(plain, reference, world.world_size, range(2))

        assert differences(model.state_dict(), plain.state_dict()) == {}, (name, way)


@pytest.mark.req("P-02")
@on_ranks(2)
def test_weights_kept_between_micro_batches_train_as_plain(world: World) -> None:
    """``no_sync`` keeps them until the backward that reduces, and nothing is stale."""
    for name, way in KERNELS:
        model = mixed("composable", strategy=ShardingStrategy.SHARD_GRAD_OP)
        plain = Mixed()
        ours, reference = made(model, name, way), made(plain, name, way)
        for at in (0, 2):
            with no_sync(model):
                backward(loss_of(model, INPUT(at, world.rank)))
            backward(loss_of(model, INPUT(at + 1, world.rank)))
            ours.step()
            ours.zero_grad()
            plain.zero_grad()
            for half in (at, at + 1):
                for rank in range(2):
                    backward(loss_of(plain, INPUT(half, rank)) / 2)
            reference.step()

        apart = differences(model.state_dict(), plain.state_dict())
        assert all(value <= 1e-5 for value in apart.values()), (name, way, apart)


class Pair(nn.Module):
    """Two units of which each may be trained alone; one rank holds none of ``gain``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.gain = nn.Linear(8, 8), Gain()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gain(self.body(x))
        return out


class Gain(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def pair() -> Any:
    model = apply_units(Pair(), ["body", "gain"])
    model(torch.ones(1, 8))
    return model


@pytest.mark.req("P-02")
@on_ranks(2)
def test_a_step_counts_for_the_units_whose_leaves_it_holds(world: World) -> None:
    """Not for others; on every rank alike; also by a closure and in a late group."""
    x = torch.ones(2, 8)

    # One rank holds nothing of ``gain``.
    for shown, text in (("body", "nothing was raised"), ("gain", STALE)):
        model = pair()
        own = optim.AdamW(model.gain.parameters(), fused=True)
        backward(loss_of(model, x))
        unshard(getattr(model, shown))
        own.step()
        assert message_of(partial(model, x)).startswith(text)

    model = pair()
    set_reshard_after_backward(model, False)
    fused = optim.SGD(model.parameters(), lr=0.1, fused=True)

    def closure() -> Tensor:
        loss = loss_of(model, x)
        backward(loss)
        return loss

    fused.step(closure)
    assert message_of(partial(model, x)).startswith(STALE)

    model = pair()
    late = optim.SGD(model.gain.parameters(), lr=0.1, fused=True)
    backward(loss_of(model, x))
    late.step()
    late.add_param_group({"params": list(model.body.parameters())})
    unshard(model.body)
    late.step()
    assert message_of(partial(model, x)).startswith(STALE)
