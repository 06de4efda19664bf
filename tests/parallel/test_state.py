"""State dicts and optimizer state of tensor-parallel models, through DCP and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

from composable_fsdp import (
    StateDictType,
    fully_shard,
    get_full_param,
    optim_state_dict,
    optim_state_dict_to_load,
    set_state_dict_type,
)
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.parallel.models import (
    Model,
    Recipe,
    average,
    batch,
    data_rank,
    loss_of,
    mesh_of,
    pair,
    sharded,
    whole,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World

_dcp: Any = torch.distributed.checkpoint


def trained(
    world: World, recipe: Recipe, dp: int
) -> tuple[Model, torch.optim.Optimizer, Model, torch.optim.Optimizer]:
    """Both models and their optimizers after two steps, bit by bit the same."""
    mesh = mesh_of(world, dp)
    model, plain = pair(recipe, mesh)
    optims = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(2):
        for each in (model, plain):
            backward(loss_of(each, batch(step, data_rank(mesh))))
        average(plain, mesh)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return model, optims[0], plain, optims[1]


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for key, value in values.items():
            assert torch.equal(found[name][key], value), (name, key)


@on_ranks(4)
def test_sharded_values_know_their_place_in_the_whole(world: World) -> None:
    """Shapes of the whole, boxes of this rank, and a gather over both axes."""
    model, optim, plain, other = trained(world, Recipe(hidden=9), 2)
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)

    values: dict[str, Any] = model.state_dict()
    state = optim_state_dict(model, optim)["state"]

    for name, parameter in plain.named_parameters():
        full = whole(parameter.detach())
        value = values[name]
        assert isinstance(value, ShardedValue)
        assert value.shape == full.shape
        assert torch.equal(value.full_tensor(), full)
        for tensor, place in value.local_shards():
            part = full
            for dim, (at, size) in enumerate(zip(*place, strict=True)):
                part = part.narrow(dim, at, size)
            assert torch.equal(tensor, part), name
        moment = state[name]["exp_avg"]
        expected = whole(other.state[parameter]["exp_avg"])
        assert torch.equal(moment.full_tensor(), expected)
    before = {n: get_full_param(model, n) for n, _ in plain.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(values)
    for name, expected in before.items():
        assert torch.equal(get_full_param(model, name), expected)


@pytest.mark.req("M-01")
@on_ranks(4)
def test_dcp_goes_to_and_from_every_mesh(world: World, tmp_path: Path) -> None:
    """Model and optimizer, to another mesh, to sharding alone, and to neither."""
    recipe = Recipe(hidden=9)
    model, optim, plain, _ = trained(world, recipe, 4)
    weights = {n: get_full_param(model, n) for n, _ in plain.named_parameters()}
    states = optim_state_dict(model, optim)["state"]
    write(model, optim, str(tmp_path))

    for dp in (2, 0):
        fresh = recipe.plain()
        if dp:
            mesh = mesh_of(world, dp)
            fresh = sharded(recipe.parallel(mesh), mesh)
        else:
            fully_shard(fresh)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        empty = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
        read(fresh, empty, str(tmp_path))
        for name, value in weights.items():
            assert torch.equal(get_full_param(fresh, name), value), name
        require_same(optim_state_dict(fresh, empty)["state"], states)
    alone = recipe.plain()
    read(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), str(tmp_path))
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter.detach(), weights[name])


def write(model: nn.Module, optim: torch.optim.Optimizer, folder: str) -> None:
    """Save by torch's functions for state dicts."""
    values, state = get_state_dict(model, optim)
    _dcp.save({"model": values, "optim": state}, checkpoint_id=folder)
    dist.barrier()


def read(model: nn.Module, optim: torch.optim.Optimizer, folder: str) -> None:
    """Load by torch's functions for state dicts."""
    values, state = get_state_dict(model, optim)
    _dcp.load({"model": values, "optim": state}, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=values, optim_state_dict=state)


@on_ranks(4)
def test_local_state_comes_back_to_the_same_place(world: World, tmp_path: Path) -> None:
    """A file per rank, of the model and of the optimizer; no other place takes it."""
    recipe = Recipe(tied=True)
    model, optim, plain, _ = trained(world, recipe, 1)
    names = [name for name, _ in plain.named_parameters()]
    weights = {name: get_full_param(model, name) for name in names}
    states = optim_state_dict(model, optim)["state"]
    set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)

    local = {"model": model.state_dict(), "optim": optim_state_dict(model, optim)}
    torch.save(local, tmp_path / f"{world.rank}.pt")

    for name, parameter in model.named_parameters():
        assert torch.equal(local["model"][name].local, parameter.detach())
    file = torch.load(tmp_path / f"{world.rank}.pt", weights_only=False)
    mesh = mesh_of(world, 1)
    again = sharded(recipe.parallel(mesh), mesh)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    set_state_dict_type(again, StateDictType.LOCAL_STATE_DICT)
    again.load_state_dict(file["model"])
    optim_state_dict_to_load(again, other, file["optim"], load_directly=True)
    set_state_dict_type(again, StateDictType.FULL_STATE_DICT)
    for name, value in weights.items():
        assert torch.equal(get_full_param(again, name), value), name
    require_same(optim_state_dict(again, other)["state"], states)

    dist.barrier()
    elsewhere = torch.load(tmp_path / f"{(world.rank + 1) % 4}.pt", weights_only=False)
    set_state_dict_type(again, StateDictType.LOCAL_STATE_DICT)
    text = message_of(lambda: again.load_state_dict(elsewhere["model"]))
    assert "expects another ShardedValue with elements [" in text
