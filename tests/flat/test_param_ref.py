"""Which parameter a message means, where a unit has two of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    MixedPrecision,
    fully_shard,
    unshard,
    unshard_params,
)
from composable_fsdp.flat.param_ref import param_refs, slot_paths
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


class Layer(nn.Module):
    """A linear layer that may write to its weight, and may leave a part out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.writes = self.rests = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.inner.weight.mul_(0.5)
        y: Tensor = x if self.rests else self.inner(x)
        return y


class Twins(nn.Module):
    """Two modules of one unit, with equal names below, in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"a": Layer(), "b": Layer()})
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.body["b"](self.body["a"](x)))
        return y

    @property
    def b(self) -> Layer:
        layer = self.body["b"]
        assert isinstance(layer, Layer)
        return layer


X = torch.ones(2, 4)


def twins(mixed: MixedPrecision | None = None, *, runs: bool = True) -> Twins:
    """Make one unit of both layers, and the root."""
    torch.manual_seed(0)
    model = Twins()
    fully_shard([model.body["a"], model.body["b"]], mixed_precision=mixed)
    fully_shard(model)
    if runs:
        backward(model(X).sum())
    return model


@pytest.mark.req("N-09")
@on_ranks(2)
def test_the_path_of_every_parameter_is_its_name_in_the_plain_model(
    world: World,
) -> None:
    """In units of several modules and of one, of each place of a tied parameter."""
    model = Twins()
    model.body["b"].tied = model.body["a"].inner
    fully_shard([model.body["a"], model.body["b"]])
    fully_shard(model)
    plain: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain.setdefault(id(parameter), set()).add(name)

    model(X)

    refs = [ref for h in _get_fsdp_handles(model) for ref in param_refs(h)]
    assert {id(ref.leaf) for ref in refs} == plain.keys()
    for ref in refs:
        assert ref.name in plain[id(ref.leaf)]
        assert set(slot_paths(ref.handle, ref.slot)) <= plain[id(ref.leaf)]


def full(model: Twins) -> None:
    loss = model(X).sum()
    unshard(model.body["a"])
    torch.autograd.grad(loss, [model.b.inner.weight])


def replaced(model: Twins) -> None:
    with unshard_params(model):
        model.b.inner._parameters["weight"] = nn.Parameter(torch.ones(1))


def orthogonal(model: Twins) -> None:
    untyped: Any = torch.optim.Muon([model.b.inner.weight], lr=0.1)
    untyped.step()


def written(model: Twins) -> None:
    model.b.writes = True
    model(X)


def apart(model: Twins) -> None:
    model.b.inner(X)


CASES: dict[str, Callable[[Twins], None]] = {
    each.__name__: each for each in (full, replaced, orthogonal, written, apart)
}


@pytest.mark.req("N-09")
@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_an_error_names_the_second_module(world: World, case: str) -> None:
    """By the path from the root, and not as a parameter of the unit's first module."""
    low = MixedPrecision(
        torch.bfloat16, cast_forward_inputs=True, output_dtype=torch.float32
    )
    model = twins(low if case == "written" else None)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the text is looked at
        CASES[case](model)
    text = str(caught.value)

    assert "'body.b.inner" in text
    assert "body.a.inner" not in text
