"""Containers in which tensors enter and leave a module, and how to open them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
