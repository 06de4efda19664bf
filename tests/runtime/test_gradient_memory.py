"""Memory of gradients that were cleared, and gradients that somebody still has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    no_sync,
    unshard_params,
)
from composable_fsdp.flat import memory
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.sharded import RankCount
from tests.support.tiny import tiny_mlp
from tests.support.world import World


def sharded() -> nn.Module:
    """An MLP of one unit."""
    return fully_shard(tiny_mlp())


def inputs() -> Tensor:
    """Two rows, one the negative of the other: no unit is dead for both."""
    return torch.linspace(0.5, 1.0, 8) * torch.tensor([[1.0], [-1.0]])


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """One forward and backward, ``.grad`` proportional to ``scale``."""
    (model(inputs()).sum() * scale).backward()


def has_memory(model: nn.Module) -> bool:
    """Whether the flat gradient of the unit has."""
    (region,) = _get_fsdp_handles(model)[0].layout.trainable
    return region.gradient.shard is not None and memory.is_allocated(
        region.gradient.shard
    )


@pytest.mark.req("U-03")
def test_cleared_gradients_take_no_memory_in_forward(one_rank: World) -> None:
    """Their memory comes back at the reduction, with the same gradients."""
    model = sharded()
    backward(model)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.zero_grad()
    output = model(inputs())
    freed = not has_memory(model)
    output.sum().backward()

    assert freed
    assert has_memory(model)
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(again) == len(first) == 4
    assert all(map(torch.equal, again, first))


def test_gradients_that_are_shown_keep_their_memory(one_rank: World) -> None:
    """One is enough; the next backward adds to it."""
    model = sharded()
    backward(model)
    kept, *others = model.parameters()
    for parameter in others:
        parameter.grad = None
    assert kept.grad is not None
    before = kept.grad.clone()

    model(inputs())
    still = has_memory(model)
    backward(model)

    assert still
    torch.testing.assert_close(kept.grad, 2 * before)


@pytest.mark.parametrize(
    "hold",
    [
        lambda gradient: gradient,
        lambda gradient: gradient.detach(),
        lambda gradient: gradient[:1],
        lambda gradient: gradient.untyped_storage(),
        lambda gradient: _as_gradient(gradient),
    ],
    ids=["itself", "detached", "a part", "storage", "as a gradient"],
)
def test_a_gradient_that_somebody_has_keeps_its_values(
    hold: Callable[[Tensor], object], one_rank: World
) -> None:
    """As after autograd: the next backward makes other gradients."""
    model = sharded()
    backward(model)
    weight = next(model.parameters())
    assert weight.grad is not None
    before = weight.grad.clone()
    held = hold(weight.grad)

    model.zero_grad()
    backward(model, scale=3.0)

    torch.testing.assert_close(weight.grad, 3 * before)
    kept = _values(held)[: before.numel()]
    assert kept[:8].all()
    torch.testing.assert_close(kept, before.flatten()[: kept.numel()])


@pytest.mark.parametrize(
    "hold",
    [
        lambda gradient: gradient,
        lambda gradient: gradient.untyped_storage(),
        lambda gradient: gradient.numpy(),
    ],
    ids=["itself", "storage", "numpy"],
)
def test_a_held_gradient_keeps_its_values_when_no_forward_comes_between(
    hold: Callable[[Tensor], object], one_rank: World
) -> None:
    """Several losses of one forward, each with gradients of its own."""
    model = sharded()
    weight = next(model.parameters())
    loss = model(inputs()).sum()
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    before = weight.grad.clone()
    held = hold(weight.grad)

    model.zero_grad()
    (3 * loss).backward()

    torch.testing.assert_close(weight.grad, 3 * before)
    kept = _values(held)[: before.numel()]
    torch.testing.assert_close(kept, before.flatten())


def test_a_held_gradient_of_an_offloaded_unit_keeps_its_values(one_rank: World) -> None:
    """The next backward copies to other memory of the host."""
    model = fully_shard(tiny_mlp(), cpu_offload=CPUOffload(offload_params=True))
    weight = next(model.parameters())
    backward(model)
    held = weight.grad
    assert held is not None
    before = held.clone()

    model.zero_grad()
    backward(model, scale=3.0)

    assert torch.equal(held, before)
    torch.testing.assert_close(weight.grad, 3 * before)


@pytest.mark.parametrize(
    "show",
    [Tensor.numpy, Tensor.share_memory_],
    ids=["numpy", "another process"],
)
def test_a_gradient_that_was_given_away_does_not_break_the_next_step(
    show: Callable[[Tensor], object], one_rank: World
) -> None:
    """Such memory cannot be resized, also when nobody has it any more."""
    model = sharded()
    weight = next(model.parameters())
    backward(model)
    assert weight.grad is not None
    before = weight.grad.clone()
    show(weight.grad)

    model.zero_grad()
    backward(model, scale=3.0)
    torch.testing.assert_close(weight.grad, 3 * before)
    model.zero_grad()
    model(inputs())

    assert not has_memory(model)


def test_a_gradient_whose_data_was_replaced_is_what_counts(one_rank: World) -> None:
    """``p.grad.data = ...``, to which backward adds, and which clipping scales."""
    model = sharded()
    backward(model)
    weight, *others = model.parameters()
    assert weight.grad is not None
    before = weight.grad.clone()

    weight.grad.data = weight.grad.data * 0.5
    rest = [p.grad.square().sum() for p in others if p.grad is not None]
    norm = clip_grad_norm_(model, 1e9)
    backward(model)

    torch.testing.assert_close(norm**2, (0.5 * before).square().sum() + sum(rest))
    torch.testing.assert_close(weight.grad, 1.5 * before)
    weight.grad.data = weight.grad.data * 0.5
    model.zero_grad()
    backward(model)
    backward(model)
    torch.testing.assert_close(weight.grad, 2 * before)


def test_the_data_of_a_flat_gradient_may_be_replaced(one_rank: World) -> None:
    """The gradients of the leaves, as a block shows them, are parts of the new data."""
    model = sharded()
    (flat,) = flat_parameters(model)
    backward(model)
    assert flat.grad is not None
    before = flat.grad.clone()
    flat.grad.data = flat.grad.data * 0.5

    with unshard_params(model, with_grads=True):
        shown = [p.grad for p in model.parameters() if p.grad is not None]
        shown_norm = torch.stack([g.norm() for g in shown]).norm()
    backward(model)

    torch.testing.assert_close(shown_norm, 0.5 * before.norm())
    torch.testing.assert_close(flat.grad, 1.5 * before)


class _ReturnsTheWeight(torch.autograd.Function):
    """Its gradient is the memory of the weight it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Nothing of the weight is in the output."""
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """As for a penalty of half the weight squared."""
        (weight,) = ctx.saved_tensors
        return gradient, weight.detach()


class _Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, 64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _ReturnsTheWeight.apply(x, self.weight)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


def _gradient_is_the_weight(world: World) -> bool:
    penalty = _Penalty()
    model = nn.Sequential(nn.Linear(8, 8), penalty)
    fully_shard(penalty)
    fully_shard(model)
    with no_sync(model):
        model(inputs()).sum().backward()
    model(inputs()).sum().backward()
    gradient = penalty.weight.grad
    assert gradient is not None
    return torch.equal(gradient, 2 * penalty.weight)


def test_a_gradient_may_be_the_memory_of_the_weights(ranks: RankCount) -> None:
    """It waits until they were freed."""
    assert all(ranks(2).run(_gradient_is_the_weight))


def _goes_on_after_numpy(world: World) -> bool:
    model = fully_shard(nn.Linear(8, 8))
    with unshard_params(model):
        seen = model.weight.detach().numpy().copy()
    backward(model)
    with unshard_params(model):
        return bool((seen == model.weight.detach().numpy()).all())


def test_full_parameters_may_be_shown_to_numpy(ranks: RankCount) -> None:
    """Their memory cannot be resized any more, and stays."""
    assert all(ranks(2).run(_goes_on_after_numpy))


def _as_gradient(gradient: Tensor) -> nn.Parameter:
    other = nn.Parameter(torch.zeros_like(gradient))
    other.grad = gradient
    return other


def _values(held: object) -> Tensor:
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held)
    if isinstance(held, np.ndarray):
        held = torch.from_numpy(held)
    if isinstance(held, nn.Parameter):
        held = held.grad
    assert isinstance(held, Tensor)
    return held.flatten()
