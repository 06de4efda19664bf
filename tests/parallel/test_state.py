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
    fully_shard,
    get_full_param,
    optim_state_dict,
)
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
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
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
