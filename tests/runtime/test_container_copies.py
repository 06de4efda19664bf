"""Containers that a unit is given keep what it appends, sets and takes out."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from composable_fsdp import MixedPrecision, get_full_grad
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units, averaged_gradients, backward
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


@dataclass
class State:
    """What layers hand from one to the next."""

    h: Tensor
    seen: list[Tensor] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """One that cannot be assigned to; what it holds can be."""

    h: Tensor
    seen: list[Tensor]


class Batch(UserDict[str, Any]):
    """A mapping that is no dict."""


class Cache:
    """An object that pytree knows, as caches of transformers are registered."""

    def __init__(self, h: Tensor) -> None:
        self.keys, self.length = [h], 1

    def update(self, h: Tensor) -> None:
        """Keep ``h``."""
        self.keys.append(h)
        self.length += 1


pytree.register_pytree_node(
    Cache,
    lambda c: ([c.keys], None),
    lambda parts, _: copy.copy(parts),
)


def appended(unit: nn.Module, x: Tensor, given: Any) -> Tensor:
    y: Tensor = unit.linear(x).tanh()  # type: ignore[operator]  # a module
    given.append(y.square().mean())
    return y


def put_first(unit: nn.Module, x: Tensor, given: Any) -> Tensor:
    """The first item goes, the last comes to the front, beside the input itself."""
    y: Tensor = unit.linear(x).tanh()  # type: ignore[operator]  # a module
    last = given.pop()
    given[0] = y
    given.insert(0, last)
    given.insert(0, x)
    return y


def set_key(unit: nn.Module, x: Tensor, given: Any) -> Tensor:
    y: Tensor = unit.linear(given["h"]).tanh()  # type: ignore[operator]  # a module
    given["before"], given["h"] = given["h"], y
    given.setdefault("all", []).append(y)
    given.pop("gone", None)
    return y


def set_attribute(unit: nn.Module, x: Tensor, given: Any) -> Tensor:
    y: Tensor = unit.linear(given.h).tanh()  # type: ignore[operator]  # a module
    given.seen.append(y * 2)
    if not isinstance(given, Frozen):
        given.h, given.note, given.more = y, given.note + "+", x
    return y


def updated(unit: nn.Module, x: Tensor, given: Any) -> Tensor:
    y: Tensor = unit.linear(x + given.keys[-1]).tanh()  # type: ignore[operator]  # a module
    given.update(y)
    return y


def nested(unit: nn.Module, x: Tensor, given: Any) -> Tensor:
    """Two ways lead to one list."""
    y: Tensor = unit.linear(x).tanh()  # type: ignore[operator]  # a module
    assert given["a"][0] is given["b"]
    given["a"][0].append(y)
    given["b"].append(given["b"][0])
    return y


Act = Callable[[nn.Module, Tensor, Any], Tensor]
CASES: dict[str, tuple[Callable[[Tensor], Any], Act]] = {
    "list": (lambda h: [h, 3], appended),
    "changed list": (lambda h: [h, h * 2, h * 3], put_first),
    "deque": (lambda h: deque([h], maxlen=2), appended),
    "dict": (lambda h: {"h": h, "gone": h + 1}, set_key),
    "ordered dict": (lambda h: OrderedDict(h=h, gone=1), set_key),
    "defaultdict": (lambda h: defaultdict(list, h=h), set_key),
    "mapping": (lambda h: Batch(h=h), set_key),
    "dataclass": (State, set_attribute),
    "frozen dataclass": (lambda h: Frozen(h, [h]), set_attribute),
    "cache": (Cache, updated),
    "nested": (lambda h: (lambda inner: {"a": (inner, 1), "b": inner})([h]), nested),
}


class Unit(nn.Module):
    """One linear layer that does something to what it is given."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act
        self.is_raising = False

    def forward(self, x: Tensor, given: Any) -> Any:
        y = self.act(self, x, given)
        if self.is_raising:
            raise RuntimeError("after the change")
        return y, given


class Net(nn.Module):
    """Two units that are given the same container, by position and by name."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.make, act = CASES[case]
        self.first = nn.Linear(4, 4)
        self.units = nn.ModuleList([Unit(act), Unit(act)])
        self.held: Any = None
        self.own: list[bool] = []

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.first(x)
        self.held = given = self.make(h)
        y, same = self.units[0](h, given)
        assert same is given
        y, same = self.units[1](y, given=given)
        assert same is given
        found = tensors(given)
        # What the units left alone is the caller's own, and no alias of it.
        self.own = [tensor is h for tensor in found]
        return [y, *found]


def tensors(value: Any) -> list[Tensor]:
    """The tensors in ``value``, by items or attributes."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (UserDict, dict)):
        value = list(value.values())
    elif isinstance(value, Frozen):
        value = [value.h, value.seen]
    elif isinstance(value, (State, Cache)):
        value = list(vars(value).values())
    found: list[Tensor] = []
    for item in value if isinstance(value, (list, tuple, deque)) else []:
        found += tensors(item)
    return found


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of everything that units left in the container."""
    total = torch.zeros(())
    for i, each in enumerate(model(x)):
        total = total + (i + 1) * each.float().square().mean()
    return total


def net_of(model: nn.Module) -> Net:
    """The net itself, on either door."""
    return next(m for m in model.modules() if isinstance(m, Net))


@pytest.mark.req("P-05")
@on_ranks(2)
def test_containers_keep_what_units_do_to_them(world: World) -> None:
    """Lists, dicts, mappings, dataclasses and caches, by position and by name.

    Losses and gradients are the plain model's, for every container.
    """
    inputs = [torch.full((2, 4), 0.1 * rank + 0.2) for rank in range(world.world_size)]
    for case in CASES:
        plain = Net(case)
        models = [
            apply_units(copy.deepcopy(plain), ["units.0", "units.1"], path=p)
            for p in PATHS
        ]
        losses = averaged_gradients(plain, inputs, loss_of)
        for model in models:
            loss = loss_of(model, inputs[world.rank])
            assert net_of(model).own == plain.own, case
            assert torch.allclose(loss, torch.tensor(losses[world.rank])), case
            backward(loss)
            for name, p in plain.named_parameters():
                mine, theirs = get_full_grad(model, name), p.grad
                if theirs is not None and theirs.any():
                    assert mine is not None
                    assert torch.allclose(mine, theirs, atol=1e-6), (case, name)


@pytest.mark.req("P-05")
@on_ranks(2)
def test_a_unit_that_raises_has_appended_what_it_appended(world: World) -> None:
    """What was done before the raise arrives in the caller's list.

    A unit that raises has still appended, as in a plain model; so without grads.
    """
    for path in PATHS:
        net = Net("list")
        model = apply_units(copy.deepcopy(net), ["units.0", "units.1"], path=path)
        last = [m for m in model.modules() if isinstance(m, Unit)][-1]
        last.is_raising = True
        with pytest.raises(RuntimeError, match="after the change"):
            model(torch.ones(2, 4))
        assert len(net_of(model).held) == 4
        last.is_raising = False
        with torch.no_grad():
            assert len(model(torch.ones(2, 4))) == 4


@pytest.mark.req("P-05")
@on_ranks(2)
def test_containers_of_tensors_that_are_cast_keep_it_too(world: World) -> None:
    """The unit works on cast copies, with gradients and without.

    Units that cast their inputs give back what they made, and leave the rest.
    """
    low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for path in PATHS:
        for case in ("list", "changed list", "dict", "dataclass", "cache"):
            for grads in (True, False):
                net = Net(case)
                model = apply_units(
                    net, ["units.0", "units.1"], path=path, mixed_precision=low
                )
                with torch.set_grad_enabled(grads):
                    found = model(torch.ones(2, 4))[1:]
                plain = Net(case)
                expected = plain(torch.ones(2, 4))[1:]
                assert len(found) == len(expected), (case, path)
                for mine, theirs in zip(found, expected, strict=True):
                    assert torch.allclose(mine.float(), theirs, atol=0.05), (case, path)
