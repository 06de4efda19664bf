"""What a forward writes to its weights, and weights that a caller puts in its place.

Other things that units do to what they are given are forms of `property_tests`.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, reshard, unshard
from composable_fsdp.errors import CompositionError
from composable_fsdp.features.passages import weight_writes as forward_writes
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    assert_same_training,
    backward,
    differences,
    sgd,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import World

WIDTH = 6


class Writes(nn.Module):
    """A layer whose forward writes to its weights first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def write(self) -> None:
        """Change the weights; the same a second time changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.write()
        return x + torch.tanh(self.layer(x))


class Normalises(Writes):
    """Forced weight norm, as in EDM2."""

    def write(self) -> None:
        with torch.no_grad():
            weight = self.layer.weight
            weight.copy_(2 * weight / weight.norm(dim=1, keepdim=True))


class Clamps(Writes):
    """Weight clipping, through ``.data``."""

    def write(self) -> None:
        self.layer.weight.data.clamp_(-0.2, 0.2)


class Sorts(Writes):
    """Changes the order of weights, and neither their sum nor their bits."""

    def write(self) -> None:
        self.layer.weight.data.copy_(self.layer.weight.data.sort(dim=0).values)


KINDS = (Normalises, Clamps, Sorts)


def build(kind: type[nn.Module]) -> nn.Sequential:
    """Three layers and a head; the same values in every process."""
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), kind(), nn.Linear(WIDTH, 2))


UNITS = ("0", "1", "2")


@pytest.mark.few(2)
@pytest.mark.req("P-06")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_a_write_to_weights_in_forward_reaches_the_shards(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """In place and through ``.data``, in training and evaluation."""
    make = wide_input(WIDTH)
    for kind in KINDS:
        plain = build(kind)
        model = apply_units(copy.deepcopy(plain), UNITS, path=path, strategy=strategy)
        losses = train(model, world.rank, make, sgd)
        with torch.no_grad():
            model(make(9, world.rank))
        losses += train(model, world.rank, make, sgd)
        expected = train_reference(plain, world.world_size, make, sgd)
        with torch.no_grad():
            plain(make(9, 0))
        expected += train_reference(plain, world.world_size, make, sgd)
        mine = [step[world.rank] for step in expected]
        assert_same_training(model, plain, losses, mine, tolerance=1e-6)


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


@pytest.mark.req("P-06")
def test_a_large_buffer_is_compared_by_checksums_that_see_each_element(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A changed element, and two exchanged elements, in any block; NaN equals NaN."""
    monkeypatch.setattr(forward_writes, "_COPIED", 4)
    monkeypatch.setattr(forward_writes, "_AT_ONCE", 8)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        full = torch.arange(1, 22).to(dtype)
        full[3] = float("nan")
        before = forward_writes._bits(full).clone()
        assert torch.equal(forward_writes._bits(full), before)
        for index in range(full.numel() - 1):
            changed, exchanged = full.clone(), full.clone()
            changed[index] = 0
            exchanged[[index, index + 1]] = full[[index + 1, index]]
            for other in (changed, exchanged):
                assert not torch.equal(forward_writes._bits(other), before)


class Scales(nn.Module):
    """Writes to an input that the caller reads, and returns another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor, into: Tensor) -> Tensor:
        into.mul_(self.gain)
        return x + 1


class Reads(nn.Module):
    """Reads what the unit below has written to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unit = nn.Linear(WIDTH, WIDTH), Scales()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) * 1
        self.unit(x, y)
        return y


@pytest.mark.req("P-06")
@on_ranks(2)
def test_backward_enters_by_an_input_that_was_written_in_place(world: World) -> None:
    """In the first forwards, which search for more, and in those after."""
    plain = Reads()
    model = apply_units(copy.deepcopy(plain), ["unit"])
    for _ in range(4):
        for each in (plain, model):
            backward(each(torch.ones(2, WIDTH)).square().sum())
            sgd(each.parameters()).step()
            each.zero_grad()

    assert_same_training(model, plain, [], [], tolerance=1e-5)


class MayClamp(Clamps):
    """Clips its weight where it is told to."""

    on = True

    def write(self) -> None:
        if self.on:
            super().write()


@on_ranks(2)
def test_a_deep_copy_knows_of_writes_through_data(world: World) -> None:
    """Also if its own first forwards, which compare all values, write nothing."""
    plain = build(MayClamp)
    model = apply_units(copy.deepcopy(plain), UNITS)
    x = wide_input(WIDTH)(0, 0)
    with torch.no_grad():
        for _ in range(3):
            plain(x), model(x)
        copies = copy.deepcopy(plain), copy.deepcopy(model)
        for each in copies:
            for on in (False, False, False, True):
                for layer in each.children():
                    vars(layer)["on"] = on
                for parameter in each.parameters():
                    parameter.mul_(2.0)
                each(x)

    assert differences(copies[1].state_dict(), copies[0].state_dict()) == {}
