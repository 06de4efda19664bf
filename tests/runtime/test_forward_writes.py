"""What a forward writes to its weights, and weights that a caller puts in its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import (
    CompositionError,
    MixedPrecision,
    PhaseError,
    ShardingStrategy,
    fully_shard,
    reshard,
    unshard,
)
from composable_fsdp.flat import forward_writes
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
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
WIDTH = 6


class Writes(nn.Module):
    """A layer whose forward writes to its weights first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def write(self) -> None:
        """Change the weights; the same a second time changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to itself."""
        self.write()
        return x + torch.tanh(self.layer(x))


class Normalises(Writes):
    """Forced weight norm, as in EDM2."""

    def write(self) -> None:
        """Give each row the norm 2."""
        with torch.no_grad():
            weight = self.layer.weight
            weight.copy_(2 * weight / weight.norm(dim=1, keepdim=True))


class Clamps(Writes):
    """Weight clipping, through ``.data``."""

    def write(self) -> None:
        """Keep weights in an interval."""
        self.layer.weight.data.clamp_(-0.2, 0.2)


class Both(Writes):
    """One parameter each way."""

    def write(self) -> None:
        """Clamp the weight, cut the bias in place."""
        self.layer.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.layer.bias.clamp_(-0.1, 0.1)


class Sorts(Writes):
    """Changes the order of weights, and neither their sum nor their bits."""

    def write(self) -> None:
        """Sort each column."""
        self.layer.weight.data.copy_(self.layer.weight.data.sort(dim=0).values)


KINDS = (Normalises, Clamps, Both, Sorts)


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
    """In place and through ``.data``, in training and evaluation.

    Each kind trains as the plain model does, and evaluates between.
    """
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


class Gives(nn.Module):
    """Goes on without a unit that gives up, after the unit has written."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Catch the error."""
        try:
            return cast(Tensor, self.inner(x))
        except GivesUpError:
            return x * 2


class GivesUpError(RuntimeError):
    """What a module raises."""


def give_up(*_: object) -> None:
    raise GivesUpError


@pytest.mark.req("P-06")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_what_a_forward_wrote_before_it_raised_stays(world: World, path: str) -> None:
    """In a unit whose caller goes on, and in one whose error ends the forward.

    Each kind raises behind its write: caught by a caller, and by the script.
    """
    for kind in KINDS:
        plain = nn.Sequential(Gives(build(kind)[0]), build(kind)[1])
        model = apply_units(copy.deepcopy(plain), ["0.inner", "1"], path=path)
        sides = plain, model
        x = wide_input(WIDTH)(0, world.rank)
        inner = [each.get_submodule("0.inner") for each in sides]
        hooks = [each.register_forward_hook(give_up) for each in inner]
        outs = [each(x) for each in sides]
        assert torch.equal(*outs)
        for hook in hooks:
            hook.remove()
        last = [
            each.get_submodule("1").register_forward_hook(give_up) for each in sides
        ]
        for each in sides:
            with pytest.raises(GivesUpError):
                each(x)
        for hook in last:
            hook.remove()
        assert torch.equal(*[each(x) for each in sides])
        weights = dict(plain.state_dict())
        assert differences(model.state_dict(), weights) == {}


def write_to_copies(world: World) -> list[str]:
    """The errors of writes to weights that are casts of the shards."""
    errors = []
    for kind in (Normalises, Clamps):
        model = apply_units(
            build(kind),
            UNITS,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
        with pytest.raises(PhaseError) as caught:
            model(torch.ones(2, WIDTH))
        errors.append(str(caught.value))
    return errors


@pytest.mark.req("P-06")
def test_a_write_to_a_copy_in_another_dtype_is_refused(ranks: RankCount) -> None:
    """It would be lost, or round every weight."""
    for in_place, through_data in ranks(2).run(write_to_copies):
        assert "Parameter '0.layer.weight' was written to" in in_place
        assert "unit '0' wrote to its weights through .data" in through_data
        assert "unshard_params" in in_place
        assert "unshard_params" in through_data


class Generates(nn.Module):
    """Calls a unit with a weight that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.made = nn.Parameter(torch.eye(WIDTH) / 2)
        self.parametrised, self.rows = True, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        """With the unit's own weight first, then with another."""
        own: Tensor = self.unit(x)
        if not self.parametrised:
            return own
        given = {"0.weight": self.made[: self.rows] * 0.5}
        other: Tensor = torch.func.functional_call(self.unit, given, (own,))
        again: Tensor = self.unit(other)
        return again


@pytest.mark.req("P-07")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_functional_call_on_a_unit_uses_the_parameters_that_it_is_given(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """Its gradients flow to what they were made of.

    Other parameters are used where they are given, own ones elsewhere.
    """
    torch.manual_seed(0)
    plain = Generates()
    model = apply_units(copy.deepcopy(plain), ["unit"], path=path, strategy=strategy)
    make = wide_input(WIDTH)
    losses = train(model, world.rank, make, sgd)
    expected = train_reference(plain, world.world_size, make, sgd)
    mine = [step[world.rank] for step in expected]
    assert_same_training(model, plain, losses, mine, tolerance=1e-6)


class Doubles(nn.Module):
    """Calls a part of it with other parameters, in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.unit = Writes(), Writes()

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Under a reentrant checkpoint the unit is gathered by its recomputation."""

        def call(x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.unit, given, (x,))
            return out

        x = self.first(x)
        if self.how != "checkpoint" or not torch.is_grad_enabled():
            return call(x)
        recomputed: Tensor = checkpoint(call, x, use_reentrant=True)
        return recomputed


@pytest.mark.req("P-07")
@pytest.mark.parametrize("how", ["checkpoint", "list", "by hand"])
@on_ranks(2)
def test_functional_call_finds_a_unit_that_is_full_for_something_else(
    world: World, how: str
) -> None:
    """Its tensors do not become the unit's, nor the unit's leaves the caller's.

    What is given is used, gets gradients, and leaves no trace in the unit.
    """
    torch.manual_seed(0)
    plain = Doubles(how)
    model = copy.deepcopy(plain)
    if how == "list":
        fully_shard([model.first, model.unit])
        fully_shard(model)
    else:
        apply_units(model, ["first", "unit"])
    values = {name: 2 * p.detach() for name, p in plain.unit.named_parameters()}
    for _ in range(2):
        if how == "by hand":
            unshard(model.unit)
        found = []
        for each in (plain, model):
            given = {name: v.clone().requires_grad_() for name, v in values.items()}
            before = dict(given)
            backward(each(torch.ones(2, WIDTH), given).square().sum())
            assert all(given[name] is before[name] for name in given)
            found.append([v.grad for v in given.values()])
            sgd(each.parameters()).step()
            each.zero_grad()
            with torch.no_grad():
                each(torch.ones(2, WIDTH), given)
        torch.testing.assert_close(*found)
        assert_same_training(model, plain, [], [], tolerance=1e-6)


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
@pytest.mark.parametrize("full", [(), ("",), ("last",), ("", "first", "last")])
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


def call_with_shards(world: World) -> str:
    """The error of parameters made of shards; what is left works."""
    model = apply_units(Generates(), ["unit"])
    model.rows = 1  # type: ignore[assignment]
    with pytest.raises(CompositionError) as caught:
        model(torch.ones(2, WIDTH))
    model.rows = WIDTH  # type: ignore[assignment]
    assert model(torch.ones(2, WIDTH)).requires_grad
    return str(caught.value)


@pytest.mark.req("P-07")
def test_parameters_of_another_shape_are_refused_by_name(ranks: RankCount) -> None:
    """What is made of this rank's rows has as many rows as this rank."""
    for text in ranks(2).run(call_with_shards):
        assert "parameter 'unit.0.weight'" in text
        assert "expected the full shape (6, 6), got (1, 6)" in text


@pytest.mark.req("P-06")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
)
def test_a_large_buffer_is_compared_by_checksums_that_see_each_element(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A changed element, and two exchanged elements, in any block; NaN equals NaN."""
    monkeypatch.setattr(forward_writes, "_COPIED", 4)
    monkeypatch.setattr(forward_writes, "_AT_ONCE", 8)
    full = torch.arange(1, 22).to(dtype)
    full[3] = float("nan")
    before = forward_writes._bits(full).clone()
    words = full.numel() * (2 if dtype.is_complex else 1)

    assert before.shape == (-(-words // 8),)
    assert torch.equal(forward_writes._bits(full), before)
    for index in range(full.numel() - 1):
        changed, exchanged = full.clone(), full.clone()
        changed[index] = 0
        exchanged[[index, index + 1]] = full[[index + 1, index]]
        assert not torch.equal(forward_writes._bits(changed), before)
        assert not torch.equal(forward_writes._bits(exchanged), before)
