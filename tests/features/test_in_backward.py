"""Programs of torch's own suites: optimizers in backward, and transforms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units, backward, differences
from tests.support.tiny import tiny_mlp
from tests.support.world import World


def give(model: nn.Module) -> None:
    """Mark parameters as torch's ``_apply_optimizer_in_backward`` does."""
    # Its import compiles for seconds.
    for each in model.parameters():
        vars(each)["_in_backward_optimizers"] = [torch.optim.Adam([each], lr=0.1)]


@pytest.mark.req("B-16")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", [True, False])
@on_ranks(2)
def test_optimizers_that_parameters_carry_step_in_backward(
    world: World, path: str, before: bool
) -> None:
    """Given before or after sharding, the gradients of a step are cleared."""
    torch.manual_seed(0)
    plain = tiny_mlp()
    model: Any = copy.deepcopy(plain)
    if before:
        give(model)
    model = apply_units(model, ("0",), path=path)
    if not before:
        give(model)
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    width = next(p for p in plain.parameters()).shape[1]
    for _ in range(3):
        x = torch.randn(2, width)
        for each in (model, plain):
            backward(each(x).square().mean())
        adam.step()
        adam.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    assert differences(model.state_dict(), plain.state_dict()) == {}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@on_ranks(2)
def test_a_transform_may_take_an_activation_from_outside(world: World) -> None:
    """The tangent of ``torch.func.jvp``, and the gradients through its output."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 6), nn.Linear(6, 10)
    first, last = (fully_shard(copy.deepcopy(each)) for each in plain)
    x, point = torch.randn(8), torch.randn(10)

    def value(one: nn.Module, two: nn.Module) -> tuple[Tensor, Tensor]:
        hidden = one(x)
        out, tangent, *_ = torch.func.jvp(lambda u: two(hidden) + u, (point,), (point,))
        return out, tangent

    for _ in range(3):
        ours, expected = value(first, last), value(*plain)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        backward(ours[0].sum())
        backward(expected[0].sum())
    for own, other in zip((first, last), plain, strict=True):
        assert other.weight.grad is not None
        rows = torch.zeros_like(other.weight)
        if own.weight.grad is not None:
            rows[: len(own.weight)] = own.weight.grad
        total = rows.square().sum()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total, other.weight.grad.square().sum())
