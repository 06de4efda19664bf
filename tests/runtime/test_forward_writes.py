"""Weights that a caller puts in place of those of a unit, and checksums of weights.

What a forward writes to its weights is a core of the programs of `property_tests`.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import reshard, unshard
from composable_fsdp.errors import CompositionError
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    assert_same_training,
    backward,
    differences,
    wide_input,
)
from tests.support.world import World

WIDTH = 6


class Generates(nn.Module):
    """Calls a unit with a weight that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.made = nn.Parameter(torch.eye(WIDTH) / 2)
        self.rows = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.unit(x)
        given = {"0.weight": self.made[: self.rows] * 0.5}
        other: Tensor = torch.func.functional_call(self.unit, given, (own,))
        again: Tensor = self.unit(other)
        return again


class Stops(nn.Module):
    """Computes with a parameter of its own and two units, and may raise between."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, error: type[BaseException] | None) -> Tensor:
        x = self.first(x @ self.own)
        if error is not None:
            raise error
        out: Tensor = self.last(x)
        return out


@pytest.mark.req("P-07")
@pytest.mark.parametrize("full", [(), ("last",), ("", "first", "last")])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@on_ranks(1, 2)
def test_functional_call_of_the_outermost_module_uses_what_it_is_given(
    world: World, error: type[BaseException] | None, full: tuple[str, ...]
) -> None:
    """Whether it raises or not, nothing of it stays, and no freed leaf is shown."""
    torch.manual_seed(0)
    plain = Stops()
    model = apply_units(copy.deepcopy(plain), ["first", "last"])
    values = {name: 2 * p.detach() for name, p in plain.named_parameters()}
    x = torch.ones(2, WIDTH)
    # With the sharded parameters before the first forward, and in a later one.
    for chosen in (["own"], ["last.weight", "first.bias"], [*values]):
        for name in full if chosen != ["own"] else ():
            unshard(model.get_submodule(name))
        found = []
        for each in (plain, model):
            given = {name: values[name].clone().requires_grad_() for name in chosen}
            made = {name: value * 1 for name, value in given.items()}
            with nullcontext() if error is None else pytest.raises(error):
                y = torch.func.functional_call(each, made, (x, error))
                backward(y.square().sum())
                found.append([value.grad for value in given.values()])
        torch.testing.assert_close(found[:1], found[1:])
        for parameter in model.parameters():
            assert type(parameter) is nn.Parameter
            memory = parameter.untyped_storage().nbytes()
            assert memory or not parameter.numel()
        torch.testing.assert_close(model(x, None), plain(x, None))
        for each in (plain, model):
            each.zero_grad()
        for name in full:
            reshard(model.get_submodule(name))
    assert_same_training(model, plain, [], [], tolerance=0)


@pytest.mark.req("P-07")
@on_ranks(2)
def test_parameters_of_another_shape_are_refused_by_name(world: World) -> None:
    """What is made of this rank's rows has as many rows as this rank."""
    model: Any = apply_units(Generates(), ["unit"])
    model.rows = 1
    match = r"parameter 'unit.0.weight'.*expected the full shape \(6, 6\), got \(1, 6\)"
    with pytest.raises(CompositionError, match=match):
        model(torch.ones(2, WIDTH))
    model.rows = WIDTH
    assert model(torch.ones(2, WIDTH)).requires_grad


class MayClamp(nn.Module):
    """Clips its weight through ``.data``, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self.layer.weight.data.clamp_(-0.2, 0.2)
        return x + torch.tanh(self.layer(x))


@on_ranks(2)
def test_a_deep_copy_knows_of_writes_through_data(world: World) -> None:
    """Also if its own first forwards, which compare all values, write nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(MayClamp() for _ in range(3)), nn.Linear(WIDTH, 2))
    model = apply_units(copy.deepcopy(plain), ("0", "1", "2"))
    x = wide_input(WIDTH)(0, 0)
    with torch.no_grad():
        for _ in range(3):
            plain(x), model(x)
        copies = copy.deepcopy(plain), copy.deepcopy(model)
        for each in copies:
            for on in (False, False, False, True):
                for layer in each.children():
                    if isinstance(layer, MayClamp):
                        layer.on = on
                for parameter in each.parameters():
                    parameter.mul_(2.0)
                each(x)

    assert differences(copies[1].state_dict(), copies[0].state_dict()) == {}
