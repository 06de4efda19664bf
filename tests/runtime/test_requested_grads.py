"""Gradients with respect to parameters, and backwards through a backward's graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    DefaultState,
    PhaseError,
    ShardingStrategy,
    flat_parameters,
    no_sync,
    recent_operations,
    reduce_scatter_hook,
    register_comm_hook,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_separate_reduce_scatter_group,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import module_at
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


def asked_gradients(model: nn.Module) -> Tensor:
    """``autograd.grad`` beside gradients that are there and stay."""
    backward(scalar(model, points()))
    parameters, x = chosen(model), points().requires_grad_()
    found = torch.autograd.grad(
        scalar(model, 2 * x), [*parameters, x], materialize_grads=True
    )
    for parameter, gradient in zip(parameters, found, strict=False):
        assert gradient.shape == parameter.shape
        if parameter.grad is not None:
            parameter.grad.add_(gradient, alpha=3.0)
    return found[-1]


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


def products_in_parameters(model: nn.Module) -> None:
    """Hessian-vector products in the parameters; the vector is the weights."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(
        scalar(model, points()), parameters, create_graph=True, materialize_grads=True
    )
    for scale in (1.0, 2.0):
        pairs = zip(found, parameters, strict=True)
        dot = sum((scale * g * p.detach()).sum() for g, p in pairs)
        assert isinstance(dot, Tensor)
        products = torch.autograd.grad(
            dot, parameters, retain_graph=True, materialize_grads=True
        )
        for parameter, product in zip(parameters, products, strict=True):
            assert product.shape == parameter.shape
            parameter.grad = product + (0 if parameter.grad is None else parameter.grad)


def penalty_of_parameters(model: nn.Module) -> Tensor | None:
    """The squares of the gradients of some parameters, beside the loss."""
    x = points().requires_grad_()
    loss = scalar(model, x)
    of_x, *found = torch.autograd.grad(loss, [x, *chosen(model)], create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in found)
    torch.autograd.backward(0.1 * loss + 0.01 * penalty + 0.1 * of_x.square().sum())
    return x.grad


def penalty_on_weights(model: nn.Module) -> Tensor:
    """All weights, as a loss beside the units sees them."""
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def with_penalty(model: nn.Module) -> None:
    """Parameters in the loss itself, and parameters that nothing else uses."""
    loss = scalar(model, points()) + penalty_on_weights(model)
    torch.autograd.backward(loss, inputs=list(model.parameters()))


def asked_with_penalty(model: nn.Module) -> None:
    """The same by ``autograd.grad``; and of the penalty alone."""
    parameters = list(model.parameters())
    loss = scalar(model, points()) + penalty_on_weights(model)
    found = torch.autograd.grad(loss, parameters)
    again = torch.autograd.grad(penalty_on_weights(model), parameters)
    for parameter, first, second in zip(parameters, found, again, strict=True):
        parameter.grad = first + second


def asked_in_forward(model: nn.Module) -> None:
    """Between a forward and its backward, of another one."""
    loss = scalar(model, points())
    parameters = chosen(model)
    found = torch.autograd.grad(scalar(model, 2 * points()), parameters)
    backward(loss)
    for parameter, gradient in zip(parameters, found, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(gradient)


def asked_with_penalty_and_graph(model: nn.Module) -> None:
    """Products with the Hessian of the loss and its penalty."""
    parameters = list(model.parameters())
    loss = scalar(model, points()) + penalty_on_weights(model)
    found = torch.autograd.grad(loss, parameters, create_graph=True)
    dot = torch.stack([g.sum() for g in found]).sum()
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(dot, parameters), strict=True
    ):
        parameter.grad = gradient


FIRST: tuple[Program, ...] = (
    with_inputs,
    with_inputs_of_both_kinds,
    asked_gradients,
    with_penalty,
    asked_with_penalty,
    asked_in_forward,
    asked_with_penalty_and_graph,
)
SECOND: tuple[Program, ...] = (
    hessian,
    hessian_vector_products,
    penalty_again,
    products_in_parameters,
    penalty_of_parameters,
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
    """``backward(inputs=...)`` and ``autograd.grad`` reduce as any backward."""
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


def own_points(rank: int) -> Tensor:
    """Inputs ``(2, WIDTH)`` of one rank."""
    return points() * (1 + rank) / 2


@pytest.mark.req("P-10")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(3)
def test_a_product_with_a_hessian_is_that_of_the_mean_over_ranks(
    world: World, strategy: ShardingStrategy
) -> None:
    """A scalar of shards is this rank's part of a sum over ranks.

    A product with the Hessian of the mean over ranks that have data of their own.
    """
    compare_products(world, *pair("composable", strategy))


def compare_products(world: World, plain: nn.Module, model: nn.Module) -> None:
    """Products with the Hessian of the mean over ranks, in a step of both models."""
    losses = [scalar(plain, own_points(rank)) for rank in range(world.world_size)]
    mean = torch.stack(losses).mean()
    for each, loss in (
        (plain, mean),
        (model, scalar(model, own_points(world.rank))),
    ):
        parameters = chosen(each)
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        pairs = zip(found, parameters, strict=True)
        dot = torch.stack([(g * p.detach()).sum() for g, p in pairs]).sum()
        products = torch.autograd.grad(dot, parameters)
        for parameter, product in zip(parameters, products, strict=True):
            parameter.grad = product
        step(each)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.req("P-10", "M-07")
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD],
    ids=lambda s: s.name,
)
@on_ranks(4)
def test_gradients_with_a_graph_are_reduced_over_the_separate_group(
    world: World, strategy: ShardingStrategy
) -> None:
    """Each reduce-scatter, told with its unit; also beside replicas."""
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, model = pair("composable", strategy, device_mesh=mesh)
    set_separate_reduce_scatter_group(model)
    before = {(each.group, each.number) for each in recent_operations()}

    compare_products(world, plain, model)

    own = [handle.rule.group for handle in _get_fsdp_handles(model)]
    sent = [
        (each.group, each.unit)
        for each in recent_operations()
        if each.op == "reduce_scatter" and (each.group, each.number) not in before
    ]
    assert {group for group, _ in sent} == {g.operations.name for g in own if g}
    assert {unit for _, unit in sent} == {"(root)", *map(repr, UNITS)}


def refusals(world: World) -> list[str]:
    """The errors of what cannot be given, and a backward that is right after them."""
    errors = []
    plain, model = pair("composable", ShardingStrategy.FULL_SHARD)
    parameters = chosen(model)
    rows = model(points())
    with pytest.raises(PhaseError, match="under vmap"):
        torch.autograd.grad(
            rows, parameters, torch.eye(2)[..., None], is_grads_batched=True
        )
    hooked = model(points())
    hooked.register_hook(
        lambda _: torch.autograd.grad(scalar(model, points()), parameters)
    )
    with pytest.raises(PhaseError, match="inside another backward"):
        backward(hooked.sum())
    _, uncut = pair("composable", ShardingStrategy.NO_SHARD)
    set_requires_all_reduce(uncut, False)
    with pytest.raises(PhaseError, match="replicas do not reduce"):
        torch.autograd.grad(scalar(uncut, points()), chosen(uncut))
    # The switch of no_sync, which turns the reduction over replicas off, too.
    set_requires_gradient_sync(uncut, False)
    with pytest.raises(PhaseError) as caught:
        torch.autograd.grad(scalar(uncut, points()), chosen(uncut))
    errors.append(str(caught.value))
    hooks = DefaultState(world.group)
    register_comm_hook(uncut, hooks, reduce_scatter_hook)
    set_requires_gradient_sync(uncut, True)
    with pytest.raises(PhaseError, match="a hook without a graph reduces unit"):
        torch.autograd.grad(scalar(uncut, points()), chosen(uncut), create_graph=True)
    for graph in (True, False):
        inner = scalar(module_at(model, "0"), points())
        with pytest.raises(PhaseError) as caught:
            torch.autograd.grad(inner, parameters, create_graph=graph)
        errors.append(str(caught.value))
    with no_sync(model), pytest.raises(PhaseError) as caught:
        torch.autograd.grad(scalar(model, points()), parameters)
    errors.append(str(caught.value))
    for each in (plain, model):
        each.zero_grad()
        backward(scalar(each, points()))
        step(each)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    return errors


@pytest.mark.req("P-09")
def test_gradients_that_cannot_be_given_are_refused_by_name(ranks: RankCount) -> None:
    """On every rank, before anything runs; never zeros."""
    for switched, graph, path, waiting in ranks(2).run(refusals):
        assert "inside no_sync" in switched
        assert "after set_requires_gradient_sync(module, True)" in switched
        assert "no path from the output to '1.layer.weight'" in graph
        assert "no path from the output to '1.layer.weight'" in path
        assert "inside no_sync" in waiting


@pytest.mark.req("P-09")
@on_ranks(2)
def test_gradients_asked_for_do_not_wait_for_the_last_backward(world: World) -> None:
    """Under ``set_is_last_backward(False)``, where reductions may be in flight.

    Gradients asked for are reduced to the end, and others stay what they are.
    """
    plain, model = pair("composable", ShardingStrategy.FULL_SHARD)
    set_is_last_backward(model, False)
    for each in (plain, model):
        backward(scalar(each, points()))
    parameters = list(model.parameters())
    found = torch.autograd.grad(scalar(model, points()), parameters)
    set_is_last_backward(model, True)
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient.numel():  # this rank holds some of it
            torch.testing.assert_close(gradient, parameter.grad)
    for each in (plain, model):
        step(each)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


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
            torch.autograd.grad(scalar(each, points()), chosen(each))
        assert len(calls) == 2
    finally:
        found._engine_run_backward = before


@pytest.mark.req("P-09")
@on_ranks(2)
def test_gradients_of_flat_parameters_can_be_asked_for(world: World) -> None:
    """They are this rank's parts, as their parameters are.

    Gradients of a flat parameter, asked for, are those that a backward gives.
    """
    _, model = pair("composable", ShardingStrategy.FULL_SHARD)
    flats = list(flat_parameters(model))
    found = torch.autograd.grad(scalar(model, points()), flats)
    assert all(flat.grad is None for flat in flats)
    backward(scalar(model, points()))
    for flat, gradient in zip(flats, found, strict=True):
        torch.testing.assert_close(gradient, flat.grad)
    # Of the leaves: the same, in parts, and the flat gradients stay.
    before = [flat.grad.clone() for flat in flats]  # type: ignore[union-attr]  # set above
    parts = torch.autograd.grad(scalar(model, points()), list(model.parameters()))
    assert all(
        torch.equal(flat.grad, values)  # type: ignore[arg-type]  # set above
        for flat, values in zip(flats, before, strict=True)
    )
    torch.testing.assert_close(
        sum(part.square().sum() for part in parts),
        sum(flat.square().sum() for flat in found),
    )
