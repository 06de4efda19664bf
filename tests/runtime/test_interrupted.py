"""Ctrl-C in any layer, forward or backward, then training goes on as the plain model.

A ``KeyboardInterrupt`` runs no post-forward hook, so what the units recorded of the
forward that was running stays until the next call finds it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor, autograd, nn
from torch.utils.checkpoint import checkpoint

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
