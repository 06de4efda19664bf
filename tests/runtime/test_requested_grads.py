"""Gradients with respect to parameters, and backwards through a backward's graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    PhaseError,
    ShardingStrategy,
    flat_parameters,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, STRATEGIES, apply_units, backward
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
WIDTH = 6
UNITS = ("0", "1", "2")


class Residual(nn.Module):
    """A block whose second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to itself."""
        return x + torch.tanh(self.norm(self.layer(x)))


def pair(
    path: str, strategy: ShardingStrategy, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A plain model, and the same one sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual() for _ in UNITS), nn.Linear(WIDTH, 1))
    model = apply_units(
        copy.deepcopy(plain), UNITS, path=path, strategy=strategy, **options
    )
    return plain, model


def points() -> Tensor:
    """Inputs ``(2, WIDTH)``, equal on all ranks."""
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def scalar(model: nn.Module, x: Tensor) -> Tensor:
    """A loss."""
    loss: Tensor = model(x).square().sum()
    return loss


def chosen(model: nn.Module) -> list[nn.Parameter]:
    """Some parameters of every unit."""
    return [p for n, p in model.named_parameters() if "weight" in n and "norm" not in n]


Program = Callable[[nn.Module], "Tensor | None"]


def with_inputs(model: nn.Module) -> None:
    """``backward(inputs=...)``, twice into the same parameters."""
    torch.autograd.backward(scalar(model, points()), inputs=chosen(model))
    torch.autograd.backward(scalar(model, 2 * points()), inputs=chosen(model)[:2])


def with_inputs_of_both_kinds(model: nn.Module) -> Tensor | None:
    """The model's input among the parameters."""
    x = points().requires_grad_()
    torch.autograd.backward(scalar(model, x), inputs=[x, *chosen(model)])
    return x.grad


def hessian(model: nn.Module) -> Tensor:
    """One backward through the graph for each row."""
    take: Any = torch.autograd.functional.hessian  # untyped in torch
    found: Tensor = take(partial(scalar, model), points())
    return found


def hessian_vector_products(model: nn.Module) -> Tensor:
    """Three vectors, one graph."""
    x = points().requires_grad_()
    (gradient,) = torch.autograd.grad(scalar(model, x), x, create_graph=True)
    generator = torch.Generator().manual_seed(3)
    vectors = [torch.randn(x.shape, generator=generator) for _ in range(3)]
    products = [
        torch.autograd.grad((gradient * v).sum(), x, retain_graph=True)[0]
        for v in vectors
    ]
    return torch.stack(products)


def penalty_again(model: nn.Module) -> None:
    """A gradient penalty, the loss, another forward, and the penalty again."""
    x = points().requires_grad_()
    loss = scalar(model, x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = gradient.square().sum()
    torch.autograd.backward(penalty, retain_graph=True)
    torch.autograd.backward(loss, retain_graph=True)
    backward(scalar(model, 2 * points()))
    backward(penalty)


def penalty_on_weights(model: nn.Module) -> Tensor:
    """All weights, as a loss beside the units sees them."""
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def with_penalty(model: nn.Module) -> None:
    """Parameters in the loss itself, and parameters that nothing else uses."""
    loss = scalar(model, points()) + penalty_on_weights(model)
    torch.autograd.backward(loss, inputs=list(model.parameters()))


FIRST: tuple[Program, ...] = (with_inputs, with_inputs_of_both_kinds, with_penalty)
SECOND: tuple[Program, ...] = (
    hessian,
    hessian_vector_products,
    penalty_again,
)


def compare(
    world: World, programs: tuple[Program, ...], path: str, strategy: ShardingStrategy
) -> None:
    """Results and gradients of each program are those of the plain model.

    All ranks have the same data, so their mean is what each has.
    """
    for program in programs:
        plain, model = pair(path, strategy)
        expected, got = program(plain), program(model)
        if expected is not None and got is not None:
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        step(plain)
        step(model)
        theirs, ours = plain.state_dict(), model.state_dict()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-4)


def step(model: nn.Module) -> None:
    """Move the weights by their gradients, so that state dicts show those."""
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.few(2)
@pytest.mark.req("P-09")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_gradients_with_respect_to_parameters_are_those_of_the_plain_model(
    path: str, strategy: ShardingStrategy, ranks: RankCount
) -> None:
    """``backward(inputs=...)`` reduces as any backward."""
    ranks(2).run(compare, FIRST, path, strategy)


@pytest.mark.few(2)
@pytest.mark.req("P-10")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_a_graph_of_a_backward_can_be_run_again_and_again(
    path: str, strategy: ShardingStrategy, ranks: RankCount
) -> None:
    """Hessians, products with vectors, and penalties with other backwards between."""
    ranks(2).run(compare, SECOND, path, strategy)


@pytest.mark.req("P-09")
@on_ranks(2)
def test_functions_in_front_of_the_engine_can_be_stacked(world: World) -> None:
    """Ours, theirs, ours again: each calls the one that it found.

    Somebody else stands in front of the engine between two applications.
    """
    _, model = pair("composable", ShardingStrategy.FULL_SHARD)
    found: Any = torch.autograd
    before, calls = found._engine_run_backward, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return before(*args, **kwargs)

    found._engine_run_backward = theirs
    try:
        _, later = pair("composable", ShardingStrategy.FULL_SHARD)
        for each in (model, later):
            torch.autograd.backward(scalar(each, points()), inputs=chosen(each))
        assert len(calls) == 2
    finally:
        found._engine_run_backward = before


@pytest.mark.req("P-09")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_autograd_grad_of_sharded_parameters_is_refused_by_name(
    world: World, graph: bool, flat: bool
) -> None:
    """On every rank before anything runs, never zeros; the next step is right."""
    plain, model = pair("composable", ShardingStrategy.FULL_SHARD)
    asked = list(flat_parameters(model)) if flat else chosen(model)
    loss = scalar(model, points())

    with pytest.raises(PhaseError) as caught:
        torch.autograd.grad(loss, [points(), *asked], create_graph=graph)

    name = "a flat parameter" if flat else "'0.layer.weight'"
    assert f"gradient of sharded parameter {name}, of which" in str(caught.value)
    assert "backward(inputs=[...])" in str(caught.value)
    backward(loss)
    backward(scalar(plain, points()))
    torch.optim.SGD(asked if flat else model.parameters(), lr=0.1).step()
    step(plain)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
