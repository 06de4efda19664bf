"""Gradients of leaves: none where a rank holds nothing, memory, and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    fully_shard,
    get_full_grad,
    no_sync,
)
from composable_fsdp.optim.names import is_absent
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    backward,
    gradients_of,
    loss_of,
    wide_input,
)
from tests.support.world import World

INPUT = wide_input(4)


class Narrow(nn.Module):
    """One row, one element, no dimension, no element, and few elements in all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) + 1.5)

        self.row, self.out = nn.Linear(4, 1), nn.Linear(1, 3)
        for linear in (self.row, self.out):
            linear.weight = drawn(*linear.weight.shape)
            linear.bias = drawn(*linear.bias.shape)
        self.scale, self.shift, self.nothing = drawn(), drawn(1), drawn(0)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.row(x * self.scale) + self.shift + self.nothing.sum()
        out: Tensor = self.out(hidden)
        return out


def narrow(path: str, seed: int = 0, **options: Any) -> nn.Module:
    return apply_units(Narrow(seed), ["row", "out"], path=path, **options)


def once(world: World, model: nn.Module, at: int = 0) -> None:
    backward(loss_of(model, INPUT(at, world.rank)))


def expected(world: World, *steps: int) -> dict[str, Tensor]:
    """The plain model's sums over ``steps`` of the mean gradients over ranks."""
    sums: dict[str, Tensor] = {}
    for at in steps:
        inputs = [INPUT(at, rank) for rank in range(world.world_size)]
        for name, value in gradients_of(Narrow(), inputs).items():
            sums[name] = sums[name] + value if name in sums else value.clone()
    return sums


def assert_gradients(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    """None exactly where nothing is held, and the plain model's as a whole."""
    for (name, leaf), whole in zip(
        model.named_parameters(), wanted.values(), strict=True
    ):
        assert is_absent(leaf) == (whole.numel() > 0 == leaf.numel()), name
        assert (leaf.grad is None) == is_absent(leaf), name
        found = get_full_grad(model, name)
        assert found is not None, name
        torch.testing.assert_close(found, whole, msg=name)


def accumulated(world: World, path: str) -> nn.Module:
    model = narrow(path)
    with no_sync(model):
        once(world, model, 0)
    for at in (1, 2):
        once(world, model, at)
    assert_gradients(model, expected(world, 0, 1, 2))
    return model


def offloaded(world: World, path: str) -> nn.Module:
    model = narrow(path, cpu_offload=CPUOffload(True))
    for at in (0, 1):
        once(world, model, at)
    assert_gradients(model, expected(world, 0, 1))
    return model


PROGRAMS = accumulated, offloaded


@pytest.mark.req("P-03")
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(3)
def test_grad_is_none_exactly_where_nothing_is_held(
    world: World, program: Callable[[World, str], nn.Module]
) -> None:
    """And the gradient as a whole is the plain model's, asked for on every rank."""
    for path in PATHS:
        model = program(world, path)
        assert sum(map(is_absent, model.parameters())) > 0
        model.zero_grad()
        once(world, model)
        assert_gradients(model, expected(world, 0))


def watch(parameter: Any, name: str, seen: list[tuple[str, torch.Size]]) -> None:
    def see(leaf: Tensor) -> None:
        assert leaf.grad is not None
        seen.append((name, leaf.grad.shape))

    parameter.register_post_accumulate_grad_hook(see)


@pytest.mark.req("B-16")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(3)
def test_hooks_are_shown_an_empty_gradient_while_they_run(
    world: World, offload: bool
) -> None:
    """As often as on other ranks, because a hook may send something."""
    for path in PATHS:
        model = narrow(path, cpu_offload=CPUOffload(offload))
        seen: list[tuple[str, torch.Size]] = []
        for name, parameter in model.named_parameters():
            watch(parameter, name, seen)
        for at in (0, 1):
            once(world, model, at)

        shapes = {name: p.shape for name, p in model.named_parameters()}
        assert len(seen) == 2 * len(shapes)
        assert all(shapes[name] == shape for name, shape in seen)
        assert_gradients(model, expected(world, 0, 1))


# ---- gradients that somebody has ----

X = torch.linspace(0.5, 1.0, 8) * torch.tensor([[1.0], [-1.0]])
"""Two rows, one the negative of the other: no unit is dead for both."""


class _ReturnsTheWeight(torch.autograd.Function):
    """The gradient of ``weight`` is the memory of the other weight, which it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (other,) = ctx.saved_tensors
        return gradient, other.detach(), None


class _Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, 64))
        self.frozen = nn.Parameter(torch.linspace(2.0, 3.0, 64), requires_grad=False)
        self.saved = "weight"

    def forward(self, x: Tensor) -> Tensor:
        other = getattr(self, self.saved)
        out: Tensor = _ReturnsTheWeight.apply(x, self.weight, other)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


@pytest.mark.parametrize("saved", ["weight", "frozen"])
@on_ranks(2)
def test_a_gradient_may_be_the_memory_of_the_weights(world: World, saved: str) -> None:
    """It waits until they were freed, also those of another region."""
    penalty = _Penalty()
    penalty.saved = saved
    model = nn.Sequential(nn.Linear(8, 8), penalty)
    fully_shard(penalty)
    fully_shard(model)
    backward(model(X).sum())
    with no_sync(model):
        backward(model(X).sum())
    backward(model(X).sum())
    expected = 3 * penalty.get_parameter(saved).detach()
    torch.testing.assert_close(penalty.weight.grad, expected)
