"""Optimizer state through the door, against torch's FSDP2."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import fsdp2, fully_shard
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import CheckpointError
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, loss_of, wide_input
from tests.support.world import World

TORCH = "torch.distributed.fsdp"


def trained(
    api: Any,
    world: World,
    optimizer_of: Any = torch.optim.AdamW,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """A model after two steps, whose last layer has fewer rows than there are ranks."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))
    for layer in (model[0], model[2], model):
        api.fully_shard(layer, **options)
    optimizer: torch.optim.Optimizer = optimizer_of(model.parameters(), lr=0.1)
    for step in range(2):
        backward(loss_of(model, wide_input(8)(step, world.rank)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """What a script makes of ``optimizer.state_dict()`` on every rank."""
    return {
        (key, name): value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


@pytest.mark.req("N-05")
@on_ranks(4)
def test_state_of_an_optimizer_has_full_tensors_on_every_rank(world: World) -> None:
    """As FSDP2's DTensors, also of parameters that some ranks have no row of."""
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
    for kind in kinds:
        options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

        made = partial(kind, **options)

        # The models stay alive, as in a script.
        model, ours = trained(fsdp2, world, optimizer_of=made)
        other, theirs = trained(
            importlib.import_module(TORCH), world, optimizer_of=made
        )
        found, expected = whole_state(ours), whole_state(theirs)
        # Keys in the same order on all ranks, or the gathers would not match.
        assert list(found) == list(expected)
        torch.testing.assert_close(found, expected)
        # A state dict loads where it came from, with the entries of absent rows.
        ours.load_state_dict(ours.state_dict())
        torch.testing.assert_close(whole_state(ours), expected)
        assert len(model) == len(other)


@on_ranks(2)
@pytest.mark.req("N-05")
def test_state_of_other_units_sends_nothing(world: World) -> None:
    """The package's own ``fully_shard`` keeps state dicts without a collective."""
    model: Any = nn.Linear(8, 1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(loss_of(model, wide_input(8)(0, world.rank)))
    optimizer.step()

    with record() as calls:
        state = optimizer.state_dict()["state"]

    assert calls == []
    # Rank 0 holds the row of the weight, and rank 1 the bias.
    assert len(state) == 1
    if world.rank == 0:
        with pytest.raises(
            CheckpointError, match=r"full_tensor expects.*by optim_state_dict\("
        ):
            state[0]["exp_avg"].full_tensor()
