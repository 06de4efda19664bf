"""Memory of gradients that were cleared, and gradients that somebody still has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard
from composable_fsdp.flat import storage
from composable_fsdp.testing.tiny import tiny_mlp
from composable_fsdp.testing.world import World
from composable_fsdp.tree.traversal import _get_fsdp_handles


def sharded() -> nn.Module:
    """An MLP of one unit."""
    return fully_shard(tiny_mlp())


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """One forward and backward, ``.grad`` proportional to ``scale``."""
    (model(torch.ones(2, 8)).sum() * scale).backward()


def has_memory(model: nn.Module) -> bool:
    """Whether the flat gradient of the unit has."""
    (region,) = _get_fsdp_handles(model)[0].trainable
    return region.grad_shard is not None and storage.is_allocated(region.grad_shard)


@pytest.mark.req("U-03")
def test_cleared_gradients_take_no_memory_in_forward(one_rank: World) -> None:
    """Their memory comes back at the reduction, with the same gradients."""
    model = sharded()
    backward(model)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.zero_grad()
    output = model(torch.ones(2, 8))
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

    model(torch.ones(2, 8))
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
    torch.testing.assert_close(_values(held)[:8], before.flatten()[:8])


def _as_gradient(gradient: Tensor) -> nn.Parameter:
    other = nn.Parameter(torch.zeros_like(gradient))
    other.grad = gradient
    return other


def _values(held: object) -> Tensor:
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held)
    if isinstance(held, nn.Parameter):
        held = held.grad
    assert isinstance(held, Tensor)
    return held.flatten()
