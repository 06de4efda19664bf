"""Parameters written while units are full: the next forward uses the new values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
    no_sync,
    set_full_param,
    set_reshard_after_backward,
    unshard,
    unshard_params,
)
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, gpt_input, loss_of
from tests.support.sharded import gpt
from tests.support.world import World


def by_hand(model: nn.Module, x: Tensor) -> None:
    model(x)
    unshard(model)


def kept_by_no_sync(model: nn.Module, x: Tensor) -> None:
    with no_sync(model):
        backward(loss_of(model, x))


def kept_on_request(model: nn.Module, x: Tensor) -> None:
    set_reshard_after_backward(model, False)
    backward(loss_of(model, x))


def before_backward(model: nn.Module, x: Tensor) -> None:
    loss_of(model, x)


def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    model.load_state_dict(values)


def set_each(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        set_full_param(model, name, value)


@pytest.mark.parametrize("assign", [load, set_each])
@pytest.mark.parametrize(
    "fill", [by_hand, kept_by_no_sync, kept_on_request, before_backward]
)
@on_ranks(2)
def test_what_is_written_while_units_are_full_is_used(
    world: World,
    fill: Callable[[nn.Module, Tensor], None],
    assign: Callable[[nn.Module, dict[str, Tensor]], None],
) -> None:
    """Full parameters of before are given up, however they came to be left."""
    model = gpt("composable", strategy=ShardingStrategy.SHARD_GRAD_OP)
    other = TinyGPT(seed=1)
    x = gpt_input(0, world.rank)
    fill(model, x)

    assign(model, other.state_dict())

    assert torch.equal(model(x), other(x))


@on_ranks(1, 2)
def test_data_that_is_assigned_between_micro_batches_is_used(world: World) -> None:
    """Units that ``no_sync`` keeps full are gathered again, as the plain model does."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    for unit in (model[0], model):
        fully_shard(unit, strategy=ShardingStrategy.SHARD_GRAD_OP)
    x = torch.ones(1, 6)
    for each in (plain, model):
        with no_sync(each) if each is model else nullcontext():
            backward(each(x).sum())
            for p in each.parameters():
                p.data = p.data * 0.5
            backward(each(x).sum())
        backward(each(x).sum())

    assert torch.equal(model(x), plain(x))
    with unshard_params(model, with_grads=True):
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
