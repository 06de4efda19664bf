"""Modules and parameters that come into a unit after it was sharded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from composable_fsdp import fully_shard, replicate, unshard
from composable_fsdp.features.changes.late_registration import PENDING
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    averaged_gradients,
    backward,
    differences,
    loss_of,
    wide_input,
)
from tests.support.sharded import both_paths
from tests.support.world import World

INPUT = wide_input(8)


class Stack(nn.Module):
    """Layers one after the other, and whatever comes into ``more``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, *self.more):
            x = layer(x).tanh()
        gain = getattr(self, "gain", None)
        return x if gain is None else x * gain


def stack(path: str = "composable") -> Any:
    return apply_units(Stack(), ["first"], path=path)


def inside(model: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(model, "module", model)
    return inner


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(8, 8)


def appended(model: Any) -> None:
    model.more.append(linear())


def replaced(model: Any) -> None:
    model.second = linear()


def replaced_unit(model: Any) -> None:
    model.first = linear()


def given_parameter(model: Any) -> None:
    model.gain = nn.Parameter(torch.ones(8))


def wrapped_in_new(model: Any) -> None:
    model.second = nn.Sequential(model.second, linear())


def checkpointed(model: Any) -> None:
    model.second = checkpoint_wrapper(linear())


TOLD: dict[str, tuple[Callable[[Any], None], str]] = {
    "appended": (
        appended,
        "'more.0.weight', 'more.0.bias' were registered",
    ),
    "replaced": (
        replaced,
        "'second.weight', 'second.bias' were registered",
    ),
    "replaced unit": (replaced_unit, "'first.weight', 'first.bias' were registered"),
    "parameter": (given_parameter, "'gain' were registered"),
    "around": (wrapped_in_new, "'second.1.weight', 'second.1.bias' were registered"),
    "checkpointed": (checkpointed, "'second.weight', 'second.bias' were registered"),
}


def caught(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in found]


@pytest.mark.req("P-15")
@both_paths
@on_ranks(2)
def test_what_was_added_is_told_at_the_next_forward_by_name(
    world: World, path: str
) -> None:
    """Once; before and after the first forward; modules, parameters, replacements."""
    for started in (False, True):
        for add, text in TOLD.values():
            model = stack(path)
            if started:
                model(INPUT(0, 0))
            add(inside(model))
            (first,) = caught(lambda: model(INPUT(0, 0)))  # noqa: B023  # called now
            assert text in first, first
            assert "the ranks drift apart. Register them before fully_shard" in first
            inside(model).idle = nn.Identity()
            assert caught(lambda: model(INPUT(0, 0))) == []  # noqa: B023
            assert not PENDING  # so a steady forward looks at nothing


@pytest.mark.req("P-15")
@on_ranks(2)
def test_what_nobody_has_to_reduce_is_not_told(world: World) -> None:
    """Frozen, wrapped late, assigned again, held by a unit, taken away, units later."""

    def frozen(model: Any) -> None:
        model.more.append(linear().requires_grad_(False))

    def late_checkpoint(model: Any) -> None:
        model.first = checkpoint_wrapper(model.first)
        model.second = checkpoint_wrapper(model.second)

    def same_again(model: Any) -> None:
        model.second = model.second
        for layer in (model.first, model.second):
            layer.weight = layer.weight

    def same_values(model: Any) -> None:
        model.load_state_dict(
            {n: v.clone() for n, v in model.state_dict().items()}, assign=True
        )

    def taken_away(model: Any) -> None:
        model.more.append(linear())
        del model.more[0]

    def buffers(model: Any) -> None:
        model.register_buffer("count", torch.zeros(1))
        model.idle = None

    def shown(model: Any) -> None:
        unshard(model.first)
        model.first = checkpoint_wrapper(model.first)

    def copied(model: Any) -> None:
        copy.deepcopy(model)(INPUT(0, 0))

    for change in (
        frozen,
        late_checkpoint,
        same_again,
        same_values,
        taken_away,
        buffers,
        shown,
        copied,
    ):
        model = stack()
        model(INPUT(0, 0))
        change(model)
        assert caught(lambda: model(INPUT(0, 0))) == [], change.__name__  # noqa: B023
    left = linear()
    block = fully_shard(nn.Sequential(linear(), left), ignored_modules=[left])
    block(INPUT(0, 0))
    left.gain = nn.Parameter(torch.ones(8))
    block.append(nn.Identity())
    assert caught(lambda: block(INPUT(0, 0))) == []
    block = nn.Sequential(fully_shard(linear()))
    block.append(linear())
    assert caught(lambda: fully_shard(block)(INPUT(0, 0))) == []


@pytest.mark.req("P-15")
@on_ranks(2)
def test_the_ways_out_train_as_the_plain_model(world: World) -> None:
    """``replicate`` or ``fully_shard`` on what was added, under a root that has run."""
    for act in (replicate, fully_shard):
        model, plain = stack(), Stack()
        model(INPUT(0, world.rank))
        added = linear()
        plain.more.append(linear())
        model.more.append(added)
        act(added)
        ours = optim.SGD(model.parameters(), lr=0.1)
        reference = optim.SGD(plain.parameters(), lr=0.1)
        for at in range(3):
            averaged_gradients(plain, [INPUT(at, rank) for rank in range(2)])
            reference.step()
            found = caught(lambda: backward(loss_of(model, INPUT(at, world.rank))))  # noqa: B023
            assert found == []
            assert caught(ours.step) == []
            ours.zero_grad()
        with torch.no_grad():
            apart = (model(INPUT(9, 0)) - plain(INPUT(9, 0))).abs().max().item()
        assert apart < 1e-5, (act.__name__, apart)
        names = differences(dict(model.state_dict()), dict(plain.state_dict()))
        assert all(value < 1e-5 for value in names.values()), names
