"""Ways to use forward and backward that are not one after the other.

Each corner is a function of a model and an input that runs forwards and backwards and
returns the tensors a user would look at. It knows nothing of sharding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.reference import backward

Corner = Callable[[Any, Tensor], list[Tensor]]

WIDTH = 6
UNITS = ("a", "b", "c")


@dataclass
class Result:
    """A dataclass that pytree does not know."""

    value: Tensor
    rest: dict[str, list[Tensor]]
    note: str = "kept"


class ModelOutput(OrderedDict[str, Tensor]):
    """A dict with attributes, as transformers has."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (None, y),
    "list": lambda y: [y, 3],
    "dict": lambda y: {"y": y, "n": "text"},
    "dataclass": lambda y: Result(y, {"more": [y * 2]}),
    "nested": lambda y: {"a": [(y, {"b": y + 1})]},
    "output": lambda y: ModelOutput(logits=y),
}
OPEN: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda o: o,
    "tuple": lambda o: o[1],
    "list": lambda o: o[0],
    "dict": lambda o: o["y"],
    "dataclass": lambda o: o.rest["more"][0],
    "nested": lambda o: o["a"][0][1]["b"],
    "output": lambda o: o.logits,
}


class Step(nn.Module):
    """``tanh(linear(x))``, perhaps re-entered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 0) -> Any:
        if depth:
            x = self(x, depth - 1)
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Three steps and a scale; the root of the units ``a``, ``b`` and ``c``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = Step(), Step(), Step()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.depth = 0
        self.loops = 1
        self.enter = False

    def forward(self, x: Tensor) -> Any:
        if self.enter:
            self.enter = False
            x = self(x)
        x = self.a(x) * self.scale
        for _ in range(self.loops):
            x = self.b(x, self.depth)
        return self.c(x) + 1.0


def sum_of_forwards(model: Chain, x: Tensor) -> list[Tensor]:
    """Two forwards, one backward of the sum."""
    loss = model(x).square().mean() + model(x + 1).square().mean()
    backward(loss)
    return [loss]


def forward_on_own_output(model: Chain, x: Tensor) -> list[Tensor]:
    """The model applied to its own output."""
    loss = model(model(x)).square().mean()
    backward(loss)
    return [loss]


def root_re_entered(model: Chain, x: Tensor) -> list[Tensor]:
    """The root's forward calls the root."""
    model.enter = True
    return sum_of_forwards(model, x)


def unit_re_entered(model: Chain, x: Tensor) -> list[Tensor]:
    """A unit's forward calls the unit, twice."""
    model.depth = 2
    losses = sum_of_forwards(model, x)
    model.depth = 0
    return losses


def unit_in_a_loop(model: Chain, x: Tensor) -> list[Tensor]:
    """One unit runs three times in one forward, in two forwards."""
    model.loops = 3
    losses = sum_of_forwards(model, x)
    model.loops = 1
    return losses


def inner_module_alone(model: Chain, x: Tensor) -> list[Tensor]:
    """The whole, then one unit by itself, then a module in a unit, then the whole."""
    values = [model(x).square().mean(), model.b(x).square().mean()]
    for value in values:
        if value.requires_grad:  # not so where the unit is frozen
            backward(value)
    alone = model.c(model.a(x)).sum()
    backward(alone)
    last = model(x).mean()
    backward(last)
    return [*values, alone, last]


def checkpointed_by_hand(model: Chain, x: Tensor) -> list[Tensor]:
    """``torch.utils.checkpoint`` around a unit, and around two, of both kinds."""
    total = torch.zeros(())
    for reentrant in (False, True):
        h = model.a(x)
        h = checkpoint(model.b, h, use_reentrant=reentrant)
        two = checkpoint(lambda h: model.c(model.b(h)), h, use_reentrant=reentrant)
        total = total + two.square().mean()
    backward(total)
    return [total]


CORNERS: dict[str, Corner] = {
    corner.__name__: corner
    for corner in (
        forward_on_own_output,
        root_re_entered,
        unit_re_entered,
        unit_in_a_loop,
        inner_module_alone,
        checkpointed_by_hand,
    )
}
