"""What a user keeps of a gradient is neither written nor shown again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard
from tests.support.world import World


def saved(gradient: Tensor) -> Tensor:
    """A graph alone holds the gradient."""
    weight = torch.ones(gradient.shape, requires_grad=True)
    return (weight * gradient).sum()


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "alias": torch.Tensor.detach,
    "view": lambda gradient: gradient[:1],
    "numpy": torch.Tensor.numpy,
    "memory": torch.Tensor.untyped_storage,
    "graph": saved,
}


def step(model: nn.Module, scale: float) -> Tensor:
    """The gradient of the weight, which ``scale`` multiplies."""
    (scale * model(torch.ones(2, 4))).sum().backward()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_of_a_gradient_keeps_its_values(one_rank: World, way: str) -> None:
    """After ``zero_grad`` and two further steps, whatever the user holds."""
    model = fully_shard(nn.Linear(4, 3))
    for _ in range(3):
        step(model, 1.0)
        model.zero_grad()
    gradient = step(model, 1.0)
    kept, address = WAYS[way](gradient), gradient.data_ptr()
    del gradient
    model.zero_grad()

    for _ in range(2):
        assert step(model, 5.0).data_ptr() != address
        model.zero_grad()

    if way == "graph":
        kept.backward()  # torch checks the versions of what it saved
    elif way == "memory":
        assert set(torch.tensor([], dtype=torch.float32).set_(kept)[:12].tolist()) == {
            2.0
        }
    else:
        assert set(torch.as_tensor(kept).flatten().tolist()) == {2.0}


def test_a_gradient_beside_one_of_the_user_has_its_own_memory(one_rank: World) -> None:
    """The sums of a reduction are a buffer of the unit, which others write next."""
    model = fully_shard(nn.Linear(4, 3))
    model.weight.grad = step(model, 1.0).clone()
    model.bias.grad = None
    step(model, 1.0)
    gradient = model.get_parameter("bias").grad
    assert gradient is not None
    assert gradient.untyped_storage().nbytes() == gradient.nbytes
