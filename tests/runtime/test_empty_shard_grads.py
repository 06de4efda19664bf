"""Gradients of leaves: none where a rank holds nothing, memory, and hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    fully_shard,
    no_sync,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    apply_units,
    backward,
    loss_of,
    wide_input,
)
from tests.support.world import World


@pytest.mark.req("B-16")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(3)
def test_hooks_are_shown_an_empty_gradient_while_they_run(
    world: World, offload: bool
) -> None:
    """As often as on other ranks, because a hook may send something."""
    layers = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3))
    model = apply_units(layers, ["0"], cpu_offload=CPUOffload(offload))
    seen: list[bool] = []

    def see(leaf: Tensor) -> None:
        assert leaf.grad is not None
        seen.append(leaf.grad.shape == leaf.shape)

    hooked: list[Any] = list(model.parameters())
    for parameter in hooked:
        parameter.register_post_accumulate_grad_hook(see)
    for at in (0, 1):
        backward(loss_of(model, wide_input(4)(at, world.rank)))

    assert seen == [True] * 2 * len(hooked)
    assert all((p.grad is None) == (not p.numel()) for p in hooked)


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
