"""Optimizers made, and steps taken, while modules show full parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    flat_parameters,
    reshard,
    unshard,
    unshard_params,
)
from tests.optim.models import INPUT, Mixed, mixed, train_plain, train_sharded
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, differences, loss_of
from tests.support.sharded import message_of
from tests.support.world import World

HALF = MixedPrecision(param_dtype=torch.bfloat16)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def in_block(**how: bool) -> Callable[[nn.Module], list[nn.Parameter]]:
    def collect(model: nn.Module) -> list[nn.Parameter]:
        with unshard_params(model, **how):
            return trainable(model)

    return collect


def unsharded_first(model: nn.Module) -> list[nn.Parameter]:
    unshard(model.get_submodule("first"))
    return trainable(model)


WAYS: dict[str, tuple[Callable[[nn.Module], list[nn.Parameter]], dict[str, Any]]] = {
    "in a block": (in_block(), {}),
    "in a block, host copies": (in_block(offload_to_cpu=True), {}),
    "in a block, half precision": (in_block(), {"mixed_precision": HALF}),
    "in a block, not cut": (in_block(), {"strategy": ShardingStrategy.NO_SHARD}),
    "after unshard": (unsharded_first, {}),
    "after unshard, half precision": (unsharded_first, {"mixed_precision": HALF}),
}


def module_of(model: nn.Module) -> nn.Module:
    """What the wrapper holds, whose units can be asked for by name."""
    inner: nn.Module = getattr(model, "module", model)
    return inner


@pytest.mark.req("P-14")
@on_ranks(2)
def test_an_optimizer_of_full_parameters_is_refused_at_each_step(world: World) -> None:
    """By name, of whatever form and door; also in a group that was added later."""
    for way, (collect, options) in WAYS.items():
        model = mixed("wrapper", **options)
        model(INPUT(0, world.rank))
        ours = optim.AdamW(collect(module_of(model)), lr=0.1)
        late = optim.AdamW([{"params": trainable(model)[:0]}], lr=0.1)
        backward(loss_of(model, INPUT(0, world.rank)))
        before = copied(model)

        texts = [message_of(ours.step) for _ in range(3)]
        late.step()
        late.add_param_group({"params": ours.param_groups[0]["params"]})
        texts.append(message_of(late.step))

        for text in texts:
            assert text.startswith("CompositionError: AdamW holds the full "), way
            assert "'first.weight'" in text, (way, text)
            assert "after reshard(module)" in text
        assert differences(copied(model), before) == {}


@pytest.mark.req("P-14")
@on_ranks(2)
def test_a_step_inside_a_block_is_refused_and_done_after_it(world: World) -> None:
    """Flat parameters count as well; the refused step leaves all as it was."""
    for flat in (False, True):
        for how in ({}, {"writeback": False}, {"rank0_only": True}):
            model, plain = mixed("wrapper"), Mixed()
            parameters = flat_parameters(model) if flat else trainable(model)
            ours = optim.SGD(parameters, lr=0.1, momentum=0.9)
            reference = optim.SGD(trainable(plain), lr=0.1, momentum=0.9)
            train_sharded(model, ours, world, range(1))
            backward(loss_of(model, INPUT(1, world.rank)))
            with unshard_params(model, **how):
                text = message_of(ours.step)
            ours.step()
            train_plain(plain, reference, world.world_size, range(2))

            assert differences(copied(model), plain.state_dict()) == {}
            assert text.startswith("PhaseError: SGD.step() was called inside unshard_")
            assert "Call it after the block" in text


@pytest.mark.req("P-14")
@on_ranks(2)
def test_full_parameters_with_full_gradients_can_be_stepped_inside_a_block(
    world: World,
) -> None:
    """``with_grads`` gives what any optimizer needs, and the block keeps the step.

    Muon on full parameters with full gradients, written back: the plain step.
    """
    model, plain = mixed("composable"), Mixed()
    reference = optim.Muon([p for p in trainable(plain) if p.ndim == 2], lr=0.1)
    matrices: optim.Optimizer | None = None
    for at in range(2):
        backward(loss_of(model, INPUT(at, world.rank)))
        with unshard_params(model, with_grads=True):
            if matrices is None:
                full = [p for p in trainable(model) if p.ndim == 2]
                matrices = optim.Muon(full, lr=0.1)
            matrices.step()
        for p in trainable(model):
            p.grad = None
    train_plain(plain, reference, world.world_size, range(2))

    assert matrices is not None
    assert differences(copied(model), plain.state_dict()) == {}
    assert "holds the full parameters" in message_of(matrices.step)


@on_ranks(2)
def test_parameters_that_are_not_shown_are_stepped(world: World) -> None:
    """A block over one unit and an earlier ``unshard`` are nobody else's business.

    Only units that are shown are refused: others step as ever.
    """
    model = mixed("composable")
    first, second = model.get_submodule("first"), model.get_submodule("second")
    ours = optim.SGD(second.parameters(), lr=0.1)
    backward(loss_of(model, INPUT(0, world.rank)))
    before = copied(model)
    with unshard_params(first):
        ours.step()
    unshard(first)
    reshard(first)
    late = optim.SGD(first.parameters(), lr=0.1)
    late.step()

    assert set(differences(copied(model), before)) == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }
