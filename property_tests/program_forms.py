"""How a result leaves a module, and how the module's caller gets at it.

Every form is a pair: what the module gives for its result ``y`` (its input was ``x``),
and how the caller finds ``y`` again. Between both is a bag: what the caller gave.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import rnn

if TYPE_CHECKING:
    from property_tests.program_model import Piece


class Named(NamedTuple):
    y: Tensor
    note: str


@dataclass
class Data:
    y: Tensor | None = None
    note: str = ""


@dataclass(frozen=True)
class Frozen:
    y: Tensor | None = None
    note: str = ""


class Thing:
    """Neither a dataclass nor a container."""

    def __init__(self, y: Tensor | None = None) -> None:
        self.y = y


class Marked(OrderedDict[str, Tensor]):
    """A dict with attributes, as model outputs are."""

    @property
    def y(self) -> Tensor:
        return self["y"]


class Call(NamedTuple):
    """One call: the module, what it was given, what it returned."""

    child: Any
    passed: Tensor
    bag: Any
    result: Any


Give = Callable[["Piece", Tensor, Tensor, Any], Any]
Take = Callable[[Call], Tensor]
Form = tuple[Give, Take, Callable[[], Any]]

FORMS: dict[str, Form] = {}
WIDTH = [4]
"""Of the model that runs now: a caller knows it."""


def form(
    name: str, give: Give, take: Take, bag: Callable[[], Any] = lambda: None
) -> None:
    FORMS[name] = (give, take, bag)


def returned(
    name: str, give: Callable[[Tensor], Any], take: Callable[[Any], Any]
) -> None:
    form(name, lambda piece, x, y, bag: give(y), lambda call: take(call.result))


returned("tensor", lambda y: y, lambda r: r)
returned("view", lambda y: y.view(-1), lambda r: r.view(-1, WIDTH[0]))
returned("view_as", lambda y: y.view_as(y), lambda r: r)
returned("transpose", lambda y: y.t(), lambda r: r.t())
returned("chunk", lambda y: torch.cat([y, y]).chunk(2)[0], lambda r: r)
returned("slice", lambda y: torch.cat([y, y], 1)[:, : y.shape[1]], lambda r: r)
returned("unsqueeze", lambda y: y.unsqueeze(0), lambda r: r[0])
returned(
    "split", lambda y: torch.split(torch.cat([y, y]), len(y)), lambda r: r[0] + r[1]
)
returned("unbind", lambda y: y.unbind(1), lambda r: torch.stack(r, 1))
returned("expand", lambda y: y.unsqueeze(0).expand(2, -1, -1), lambda r: r[1])
returned("as_strided", lambda y: y.as_strided(y.shape, y.stride()), lambda r: r)
returned("contiguous", lambda y: y.t().contiguous(), lambda r: r.t())
returned(
    "packed",
    lambda y: rnn.pack_padded_sequence(y[None], [len(y)], batch_first=True),
    lambda r: rnn.pad_packed_sequence(r, batch_first=True)[0][0],
)
returned("relu", torch.relu, lambda r: r)
returned("view_of_relu", lambda y: torch.relu(y)[:], lambda r: r)
returned("pair", lambda y: (y, None, "text"), lambda r: r[0])
returned("same_twice", lambda y: (y, y), lambda r: r[0] + r[1])
returned("with_its_view", lambda y: (y, y[0]), lambda r: r[0] * r[1].sum())
returned("list", lambda y: [y, 3], lambda r: r[0])
returned("dict", lambda y: {"y": y, "n": 1}, lambda r: r["y"])
returned("nested", lambda y: {"a": [(y * 0.5, {"b": y})]}, lambda r: r["a"][0][1]["b"])
returned("named", lambda y: Named(y, "text"), lambda r: r.y)
returned("data", lambda y: Data(y, "text"), lambda r: r.y)
returned("frozen", lambda y: Frozen(y), lambda r: r.y)
returned("marked", lambda y: Marked(y=y), lambda r: r.y)
returned("thing", Thing, lambda r: r.y)
returned("deque", lambda y: deque([y]), lambda r: r[0])
returned("thunk", lambda y: lambda: y, lambda r: r())
returned("detach", lambda y: y.detach(), lambda r: r)
returned(
    "partly",
    lambda y: (y, y.detach().argmax(1)),
    lambda r: r[0] * r[1].sum().clamp(1, 2),
)
returned("loss", lambda y: (y, y.square().mean()), lambda r: r[0] + r[1])
form(
    "given_back",
    lambda piece, x, y, bag: (x, y),
    lambda call: call.result[0] + call.result[1],
)
form(
    "input_only",  # what it computed is dropped
    lambda piece, x, y, bag: x,
    lambda call: call.result,
)
form(
    "weight_too",  # the caller gets weights of the unit, and views of them
    lambda piece, x, y, bag: (
        y,
        [(p, p[...], p.detach(), {"data": p.data}) for p in piece.core.parameters()],
    ),
    lambda call: (
        call.result[0]
        + sum(
            p.sum() * view.sum() + detached.sum() + more["data"].sum()
            for p, view, detached, more in call.result[1]
        )
    ),
)


def _keep(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Any:
    piece.kept = y
    return None


form("attribute", _keep, lambda call: call.child.kept)


def _aux(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Any:
    piece.aux = y.square().mean()
    return y


form("aux_for_loss", _aux, lambda call: call.result)
form("aux_for_parent", _aux, lambda call: call.result + call.child.aux)


def _only_aux(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Any:
    piece.aux = y.square().mean()
    return x.detach()


form("aux_only", _only_aux, lambda call: call.result)


def _aux_apart(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Any:
    # From the weights, not from what is returned.
    piece.aux = sum((p.square().sum() for p in piece.core.parameters()), y.sum() * 0)
    return y


form("aux_of_weights", _aux_apart, lambda call: call.result)


def _in_place(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Any:
    x.add_(y)


form("in_place", _in_place, lambda call: call.passed)


def _in_place_returned(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Any:
    return x.mul_(y)


form("in_place_returned", _in_place_returned, lambda call: call.result + call.passed)
form(
    "copied_in",
    lambda piece, x, y, bag: (x[:, :1].copy_(y[:, :1]), None)[1],
    lambda call: call.passed,
)
form(
    "append",
    lambda piece, x, y, bag: bag.append(y),
    lambda call: call.bag[-1],
    lambda: [torch.zeros(1)],
)
form(
    "append_beside",
    lambda piece, x, y, bag: (bag.append(y.square().mean()), y)[1],
    lambda call: call.result + sum(call.bag),
    lambda: [torch.zeros(1)],
)
form(
    "set_item",
    lambda piece, x, y, bag: bag.__setitem__("y", y),
    lambda call: call.bag["y"],
    lambda: {"y": None, "other": torch.zeros(1)},
)
form(
    "set_item_of_trained",  # the bag holds what needs a gradient
    lambda piece, x, y, bag: bag.__setitem__("y", y * bag["other"]),
    lambda call: call.bag["y"],
    lambda: {"y": None, "other": torch.ones(1, requires_grad=True)},
)
form(
    "append_to_trained",
    lambda piece, x, y, bag: bag.append(y * bag[0]),
    lambda call: call.bag[-1],
    lambda: [torch.ones(1, requires_grad=True)],
)
form(
    "set_field",
    lambda piece, x, y, bag: setattr(bag, "y", y * bag.y),
    lambda call: call.bag.y,
    lambda: Data(torch.ones(1, requires_grad=True)),
)
form(
    "set_thing",
    lambda piece, x, y, bag: setattr(bag, "y", y),
    lambda call: call.bag.y,
    Thing,
)
form(
    "into_nested",
    lambda piece, x, y, bag: bag["a"][0].append(y * bag["a"][1]),
    lambda call: call.bag["a"][0][0],
    lambda: {"a": ([], torch.ones(1, requires_grad=True))},
)
form(
    "replaced_data",
    lambda piece, x, y, bag: replace(bag, y=y),
    lambda call: call.result.y,
    lambda: Data(torch.ones(1, requires_grad=True)),
)
form(
    "removed",  # it takes out of the bag what it has used
    lambda piece, x, y, bag: y * bag.pop("other") + len(bag),
    lambda call: call.result + len(call.bag),
    lambda: {"other": torch.ones(1, requires_grad=True)},
)
form(
    "cleared",
    lambda piece, x, y, bag: (bag.clear(), bag.append(y))[1],
    lambda call: call.bag[0],
    lambda: [torch.ones(1, requires_grad=True), torch.zeros(1)],
)


def _generated(piece: Piece, x: Tensor, y: Tensor, bag: Any) -> Iterator[Tensor]:
    yield y
    yield piece.core(x)


form("generator", _generated, lambda call: sum(call.result, torch.zeros(1)))
form(
    "late_thunk",  # computes when the caller asks
    lambda piece, x, y, bag: lambda: y + piece.core(x),
    lambda call: call.result(),
)
