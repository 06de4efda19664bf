"""Ctrl-C in any layer, forward or backward, then training goes on as the plain model.

A ``KeyboardInterrupt`` runs no post-forward hook, so what the units recorded of the
forward that was running stays until the next call finds it.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, autograd, nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import (
    MixedPrecision,
    fully_shard,
    register_forward_method,
    unshard_params,
)
from composable_fsdp.errors import PhaseError
from composable_fsdp.runtime import forward
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    assert_same_training,
    backward,
    gradients_of,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.world import World

LAYERS = ("first", "blocks.0", "blocks.1", "blocks.2", "last")


class Stop(autograd.Function):
    """The identity, whose backward the user interrupts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise KeyboardInterrupt


class Layer(nn.Module):
    """A linear layer; may be interrupted behind it, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stops = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        if self.stops == "forward":
            raise KeyboardInterrupt
        if self.stops == "backward":
            x = Stop.apply(x)  # type: ignore[no-untyped-call]  # untyped in torch
        return x + 1


class Net(nn.Module):
    """Layers of the root around three blocks, of which the last runs twice."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first, self.last = Layer(), Layer()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[2]):
            if self.recomputes:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        out: Tensor = self.last(x)
        return out


@pytest.mark.req("P-04")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("stops", ["forward", "backward"])
@pytest.mark.parametrize("layer", LAYERS)
@on_ranks(2)
def test_training_goes_on_after_an_interrupt_in_any_layer(
    world: World, layer: str, stops: str, recomputes: bool
) -> None:
    """Weights are those of the plain model that never saw the interrupted batch.

    Gradients that an earlier backward accumulated stay. After one of the interrupts the
    block is called by itself first, as a user who looks for the fault does.
    """
    plain, make = Net(recomputes=recomputes), wide_input(4)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    for strategy in STRATEGIES:
        reference = copy.deepcopy(plain)
        model = apply_units(copy.deepcopy(plain), [*LAYERS[1:4]], strategy=strategy)
        ours, theirs = sgd(model.parameters()), sgd(reference.parameters())
        for step in range(3):
            backward(loss_of(model, make(step, world.rank)))
            stopped: Any = model.get_submodule(layer)
            stopped.stops = stops
            with pytest.raises(KeyboardInterrupt):
                backward(loss_of(model, make(9, world.rank)))
            stopped.stops = ""
            if step == 1 and layer in LAYERS[1:4]:
                plain_block = reference.get_submodule(layer)
                x = make(7, world.rank)
                assert stopped(x).equal(plain_block(x))
            if stops == "backward":
                # Some of its gradients have arrived, as in a plain model.
                ours.zero_grad()
                backward(loss_of(model, make(step, world.rank)))
            found = gradients_of(
                reference, [make(step, rank) for rank in range(world.world_size)]
            )
            for name, parameter in reference.named_parameters():
                parameter.grad = found[name]
            ours.step()
            theirs.step()
            ours.zero_grad()
        assert_same_training(model, reference, [], [])


class Refusing(tuple[Any, ...]):
    """A container that cannot be rebuilt while ``refuses``."""

    refuses = False

    @classmethod
    def _make(cls, items: Any) -> Refusing:
        if cls.refuses:
            raise ValueError("refused")
        return cls(items)


class Rebuilt(nn.Module):
    """Calls a block with a list, and keeps weak references to what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = Layer(), Listed()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, given: tuple[Tensor]) -> Tensor:
        inner = self.first(given[0])
        self.seen.append(weakref.ref(inner))
        out: Tensor = self.block([inner])
        return out

    def generate(self, given: tuple[Tensor]) -> Tensor:
        return self.forward(given)


class Listed(Layer):
    """A layer of the tensor in a list."""

    def forward(self, given: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(given[0])


LOW = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)


def gradients(model: nn.Module) -> list[float]:
    """Sums of the gradients, which this frees."""
    found = [0.0 if p.grad is None else float(p.grad.sum()) for p in model.parameters()]
    model.zero_grad()
    return found


@on_ranks(1)
def test_a_method_that_cannot_enter_leaves_nothing_behind(world: World) -> None:
    """Ctrl-C in the wait for the weights, and an input that cannot be cast."""
    model = Rebuilt()
    for unit in (model.block, model):
        fully_shard(unit, mixed_precision=LOW)
    register_forward_method(model, "generate")
    batch = Refusing([torch.ones(2, 4)])
    expected: list[float] = []
    for _ in range(3):
        backward(model.generate(batch).sum())
        expected = gradients(model)
    assert all(expected)
    stop = mock.patch.object(forward, "wait_unsharded", side_effect=KeyboardInterrupt)
    with stop, pytest.raises(KeyboardInterrupt):
        model.generate(batch)
    refuse = mock.patch.object(Refusing, "refuses", True)
    with refuse, pytest.raises(ValueError, match="refused"):
        model.generate(batch)

    backward(model.generate(batch).sum())

    assert gradients(model) == expected
    assert model.state_dict()


@pytest.mark.parametrize("low", [None, LOW])
@on_ranks(1)
def test_no_input_outlives_the_graph(world: World, low: MixedPrecision | None) -> None:
    """Neither in a container that the unit copies, nor before a cast."""
    model = Rebuilt()
    for unit in (model.block, model):
        fully_shard(unit, mixed_precision=low)
    for _ in range(6):
        backward(model((torch.ones(2, 4),)).sum())
    assert not any(each() is not None for each in model.seen)


@on_ranks(1)
def test_a_recomputation_inside_unshard_params_is_refused(world: World) -> None:
    """By the words of a forward there, and the next gradients are right."""
    model = nn.Sequential(Layer(), Layer())
    fully_shard(model[1])
    fully_shard(model)

    def loss() -> Tensor:
        found = checkpoint(lambda x: model(x).square().sum(), x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found

    x = torch.ones(2, 4)
    backward(loss())
    expected = gradients(model)
    for unit in (model, model[1]):
        late = loss()
        told = pytest.raises(PhaseError, match="was called inside unshard_params")
        with unshard_params(unit, recurse=False), told:
            backward(late)
        backward(loss())
        assert gradients(model) == expected
