"""After a backward that raised: the skip-this-batch idiom, beside the plain model.

A loop that catches an out-of-memory error clears the gradients, by way of the module
that it holds, and goes on with the next batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, get_full_grad
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    averaged_gradients,
    backward,
    gradients_of,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]

POINTS = ("first", "0", "1", "2", "last", "loss")
"""Behind which layer backward raises; it meets the loss first."""
WAYS = ("function", "hook")
UNITS = ["blocks.0", "blocks.1", "blocks.2"]


class OutOfMemory(RuntimeError):
    """What the batch that is skipped meets."""


class Raise(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OutOfMemory


def raise_in_hook(gradients: object) -> None:
    """A hook of the graph that raises."""
    raise OutOfMemory


class Net(nn.Module):
    """A root with layers of its own around three blocks; may raise in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.point, self.way = "", WAYS[0]

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in [
            ("first", self.first),
            *self.blocks.named_children(),
            ("last", self.last),
        ]:
            x = self.pass_on(name, layer(x).tanh())
        return self.pass_on("loss", x.square())

    def pass_on(self, point: str, x: Tensor) -> Tensor:
        """``x``, with what raises in backward if it is to be here."""
        if point != self.point:
            return x
        if self.way == "function":
            return Raise.apply(x)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
        node = x.grad_fn
        assert node is not None
        node.register_prehook(raise_in_hook)
        return x


def by_module(model: nn.Module) -> None:
    """What Trainers do."""
    model.zero_grad()


def by_parameters(model: nn.Module) -> None:
    """What loops do that set gradients to None themselves."""
    for p in model.parameters():
        p.grad = None


def with_zeros(model: nn.Module) -> None:
    """Zeros stay, and are stepped on."""
    model.zero_grad(set_to_none=False)


Clear = Callable[[nn.Module], None]
CLEARS: tuple[Clear, ...] = (by_module, by_parameters, with_zeros)
PROGRAMS = [
    (point, WAYS[i % 2], clear, STRATEGIES[(i + j) % 2])
    for i, point in enumerate(POINTS)
    for j, clear in enumerate((by_module, CLEARS[1 + i % 2]))
]


def skipping(
    model: nn.Module, net: Net, one: Callable[[int], object], clear: Clear
) -> None:
    """A batch, one that raises, and another after all gradients were cleared."""
    point, optimizer = net.point, sgd(model.parameters())
    held = list(model.parameters())
    net.point = ""
    one(0)
    net.point = point
    with pytest.raises(OutOfMemory):
        one(1)
    assert all(map(is_, held, model.parameters()))
    clear(model)
    assert not any(p.grad is not None and p.grad.any() for p in held)
    net.point = ""
    one(2)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.req("P-04")
@on_ranks(2)
def test_a_batch_whose_backward_raised_can_be_skipped(world: World) -> None:
    """``model.parameters()`` are the originals, and clearing them clears all.

    Weights are those of the plain model that skipped the same batches.
    """
    make = wide_input(4)
    for point, way, clear, strategy in PROGRAMS:
        net = Net()
        net.point, net.way = point, way
        models = [
            apply_units(copy.deepcopy(net), UNITS, path=path, strategy=strategy)
            for path in PATHS
        ]

        def plain(step: int, net: Net = net) -> None:
            before = [p.grad for p in net.parameters()]
            inputs = [make(step, rank) for rank in range(world.world_size)]
            if net.point:
                backward(loss_of(net, inputs[0]))
            averaged_gradients(net, inputs)
            for p, earlier in zip(net.parameters(), before, strict=True):
                if earlier is not None and p.grad is not None:
                    p.grad += earlier

        skipping(net, net, plain, clear)
        for path, model in zip(PATHS, models, strict=True):
            inner: Any = model.module if path == "wrapper" else model

            def ours(step: int, model: nn.Module = model) -> None:
                backward(loss_of(model, make(step, world.rank)))

            skipping(model, inner, ours, clear)
            state = model.state_dict()
            for name, value in net.state_dict().items():
                assert torch.allclose(state[name], value, atol=1e-6), (
                    point,
                    way,
                    clear.__name__,
                    path,
                    name,
                )


class Halves(nn.Module):
    """A layer, and another that is not used: only the end of backward reduces both."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 4)`` to the same."""
        return x + torch.tanh(self.used(x))


@pytest.mark.parametrize("at", ["0", "1", "2"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 2)
def test_a_hook_that_raises_at_the_end_of_backward_leaves_no_gradients(
    world: World, strategy: ShardingStrategy, at: str
) -> None:
    """The next backward gets those of its own batch alone, also of an old forward."""
    torch.manual_seed(0)
    plain, make = nn.Sequential(Halves(), Halves(), Halves()), wide_input(4)
    model = apply_units(copy.deepcopy(plain), ["0", "1", "2"], strategy=strategy)
    kept = loss_of(model, make(1, world.rank))
    hooked: Any = model.get_submodule(at)  # the method is untyped in torch
    hooks = [
        p.register_post_accumulate_grad_hook(raise_in_hook) for p in hooked.parameters()
    ]
    with pytest.raises(OutOfMemory):
        backward(loss_of(model, make(0, world.rank)))
    for hook in hooks:
        hook.remove()
    model.zero_grad()

    backward(kept)
    backward(loss_of(model, make(2, world.rank)))

    expected: dict[str, Tensor] = {}
    for step in (1, 2):
        inputs = [make(step, rank) for rank in range(world.world_size)]
        for name, gradient in gradients_of(plain, inputs).items():
            expected[name] = gradient + expected.get(name, 0)
    for name, gradient in expected.items():
        found = get_full_grad(model, name)
        assert found is not None
        torch.testing.assert_close(found, gradient)
