"""Weights that a caller puts in place of those of a unit, and writes to weights.

What a forward writes to its weights is a core of the programs of `property_tests`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import reshard, unshard
from composable_fsdp.errors import CompositionError, PlanError
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    assert_same_training,
    differences,
    wide_input,
)
from tests.support.world import World

WIDTH = 6


@pytest.mark.req("P-07")
@pytest.mark.parametrize("unsharded", [False, True])
@pytest.mark.parametrize("where", ["root", "unit", "inside"])
@on_ranks(1, 2)
def test_functional_call_on_a_unit_is_refused_by_name(
    world: World, where: str, unsharded: bool
) -> None:
    """And leaves the model as it was, with no leaf that was freed."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model: Any = apply_units(copy.deepcopy(plain), ["0", "1"])
    x = torch.ones(2, WIDTH)
    model(x)
    if unsharded:
        unshard(model)
    called, name = (model, "1.bias") if where == "root" else (model[1], "bias")
    call = partial(torch.func.functional_call, called, {name: torch.ones(WIDTH)}, (x,))

    hook = model[0].register_forward_hook(lambda *_: call())
    with pytest.raises((CompositionError, PlanError), match=r"'1.bias'"):
        model(x) if where == "inside" else call()
    hook.remove()

    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.untyped_storage().nbytes() or not parameter.numel()
    torch.testing.assert_close(model(x), plain(x))
    reshard(model)
    assert_same_training(model, plain, [], [], tolerance=0)


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
