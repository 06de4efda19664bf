"""Where the backward of a unit ends whose input is the output of the unit before."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, fully_shard, get_full_grad
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.residency import SHARDED
from composable_fsdp.tree.state import _get_module_fsdp_state
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


class Block(nn.Module):
    """Hands its input to a unit inside; returns ``also`` of the two, too."""

    def __init__(self, before: dict[str, Tensor], also: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(4, 4), nn.Linear(4, 4)
        self.before, self.also = before, also

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        made: Tensor = self.own(self.inner(x).tanh())
        found = {**self.before, "made": made, "input": x}
        return [found[name] for name in self.also] if self.also else made


class Model(nn.Module):
    """Units in a row; ``also``: what the last returns."""

    def __init__(self, also: tuple[str, ...] = ()) -> None:
        super().__init__()
        before: dict[str, Tensor] = {}
        self.first, self.before = nn.Linear(4, 4), before
        self.middle, self.last = Block({}), Block(before, also)

    def forward(self, x: Tensor) -> Tensor:
        self.before["older"] = self.first(x)
        y = self.middle(self.before["older"])
        found = self.last(y)
        self.before.clear()
        tensors = [y, found] if isinstance(found, Tensor) else [y, *found]
        return torch.stack(tensors).square().sum()


def shard(model: Model) -> None:
    blocks = (model.middle.inner, model.middle, model.last.inner, model.last)
    for unit in (model.first, *blocks, model):
        fully_shard(unit)


@on_ranks(2)
def test_a_hook_on_one_rank_leaves_the_order_of_reductions(world: World) -> None:
    """As of a rank that logs gradients of activations."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model)

    def log(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda _: None)  # type: ignore[no-untyped-call]  # torch has no types there

    for layer in (model.first, model.middle) if world.rank == 0 else ():
        layer.register_forward_hook(log)
    for _ in range(3):
        backward(model(torch.ones(2, 4)))
        backward(plain(torch.ones(2, 4)))

    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(get_full_grad(model, name), parameter.grad)


@pytest.mark.parametrize(
    "also", [("made", "input"), ("made", "older"), ("older",)], ids=" ".join
)
@on_ranks(2)
def test_a_unit_that_returns_tensors_of_before_keeps_no_graph(
    world: World, also: tuple[str, ...]
) -> None:
    """A hook at such a tensor holds no younger node; nor stays the unit full."""
    model = Model(also)
    shard(model)
    state = _get_module_fsdp_state(model.last)
    assert state is not None
    handle, resharded = state.handle, list[bool]()
    alive: list[weakref.ref[Tensor]] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = torch.ones(1)
            alive.append(weakref.ref(ctx.kept))
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            resharded.append(handle.residency is SHARDED)
            return gradient

    for _ in range(3):
        x = Noted.apply(torch.ones(2, 4, requires_grad=True))  # type: ignore[no-untyped-call]  # ditto
        backward(model(x))
        del x
    gc.collect()

    assert resharded == ["made" in also] * 3
    assert [link() for link in alive] == [None] * 3


@on_ranks(2)
def test_a_gradient_behind_a_backward_that_raised_is_told(world: World) -> None:
    """It comes through a tensor that the unit did not return."""
    kept: list[Tensor] = []
    raises = [False]

    class Unit(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            kept[:] = [made.square()]
            out = made * 1
            out.register_hook(fail)  # type: ignore[no-untyped-call]  # ditto
            return out * 2

    def fail(_: Tensor) -> None:
        if raises[0]:
            raise ArithmeticError

    model = fully_shard(Unit(4, 4), strategy=ShardingStrategy.SHARD_GRAD_OP)
    for _ in range(2):
        backward(model(torch.ones(2, 4)).sum())
    model.zero_grad()
    out, raises[0] = model(torch.ones(2, 4)), True
    with pytest.raises(ArithmeticError):
        backward(out.sum())

    with pytest.raises(PhaseError, match="did not return"):
        backward(kept[0].sum())
