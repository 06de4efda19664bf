"""Checkpoints of tensor-parallel models, to and from every other mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from composable_fsdp import (
    convert,
    describe,
    fully_shard,
    get_full_param,
    load,
    optim_state_dict,
    save,
)
from composable_fsdp.storage import export_safetensors, open_source
from composable_fsdp.tools.checkpoint_commands import compare
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
from tests.support.memory import LiveBytes
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World

Trained = tuple[nn.Module, torch.optim.Optimizer]


class WithLoose(nn.Module):
    """A model beside DTensors that no unit holds: a matrix, a frozen one, a buffer."""

    def __init__(self, model: Model, mesh: Any) -> None:
        super().__init__()
        self.model = model
        torch.manual_seed(3)
        self.matrix = nn.Parameter(placed(torch.randn(6, 9), mesh, Shard(1)))
        self.frozen = nn.Parameter(
            placed(torch.randn(5, 2), mesh, Shard(0)), requires_grad=False
        )
        self.register_buffer("table", placed(torch.arange(8.0), mesh, Shard(0)))


def placed(value: Tensor, mesh: Any, placement: Any) -> Tensor:
    """A DTensor over the mesh; the value itself without a mesh."""
    if mesh is None:
        return value
    made: Tensor = distribute_tensor(value, mesh, [placement])
    return made


def with_loose(world: World, recipe: Recipe, dp: int) -> Trained:
    """The model with DTensors in no unit; plain for dp < 0."""
    model: Model = recipe.plain()
    mesh = None
    if dp > 0:
        whole_mesh = mesh_of(world, dp)
        model, mesh = sharded(recipe.parallel(whole_mesh), whole_mesh), whole_mesh["tp"]
    made = WithLoose(model, mesh)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-2)


@on_ranks(4)
def test_files_for_others_are_those_of_the_plain_model(
    world: World, tmp_path: Path
) -> None:
    """Exports of the model and of the checkpoint; other formats; inspect and diff."""
    model, optim = with_loose(world, Recipe(hidden=9), 2)
    plain, _ = with_loose(world, Recipe(hidden=9), -1)
    expected = {n: v.detach() for n, v in plain.state_dict().items()}
    save(tmp_path / "native", model, optim)

    export_safetensors(tmp_path / "live.safetensors", model)
    if world.rank == 0:
        export_safetensors(tmp_path / "file.safetensors", tmp_path / "native")
        convert(tmp_path / "native", tmp_path / "dcp", "dcp")
        convert(tmp_path / "native", tmp_path / "whole", "native")
    dist.barrier()

    for name in ("live", "file"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
    for name in ("live.safetensors", "dcp", "whole"):
        again, _ = with_loose(world, Recipe(hidden=9), 1)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        load(tmp_path / name, again)
        for key, parameter in again.named_parameters():
            if key.startswith("model."):
                value = get_full_param(again, key)
            else:
                value = whole(parameter.detach())
            assert torch.equal(value, expected[key]), key
    with open_source(tmp_path / "native") as a, open_source(tmp_path / "whole") as b:
        assert compare(a, b)["equal"]
    assert "model.blocks.0.down.weight" in str(describe(tmp_path / "native"))


@on_ranks(4)
@pytest.mark.req("K-01")
def test_copies_that_differ_are_refused(world: World, tmp_path: Path) -> None:
    """Of parameters that are not cut, and of DTensors in no unit: one would be lost."""
    model, optim, _, _ = trained(world, Recipe(), 2)
    norm = dict(model.named_parameters())["blocks.0.norm.weight"]
    save(tmp_path / "same", model, optim)
    if norm.numel():
        optim.state[norm]["step"] += world.rank % 2
    text = message_of(lambda: save(tmp_path / "new", model, optim))
    assert (
        "blocks.0.norm.weight (state 'step'), of which several ranks hold copies"
        in text
    )

    loose, _ = with_loose(world, Recipe(), 2)
    matrix: Any = dict(loose.named_parameters())["matrix"]
    other = torch.optim.AdamW([matrix])
    matrix.grad = torch.zeros_like(matrix)
    other.step()
    save(tmp_path / "loose", loose, other)
    other.state[matrix]["step"] += world.rank // 2
    text = message_of(lambda: save(tmp_path / "new", loose, other))
    assert "DTensor \"matrix (state 'step')\", in no unit, is not the same" in text
    with torch.no_grad():
        matrix.to_local().add_(world.rank == 3)
    text = message_of(lambda: save(tmp_path / "new", loose))
    assert "DTensor 'matrix at (0, 5)', in no unit, is not the same" in text
    assert "on rank 3 than on rank 1" in text
    assert not (tmp_path / "new" / "manifest.json").exists()


class Columns(nn.Module):
    """A matrix whose columns are cut, of 4 MiB, in a unit."""

    def __init__(self, mesh: Any, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(placed(torch.randn(512, 2048), mesh["tp"], Shard(1)))
        fully_shard(self, device_mesh=mesh["dp"])


@on_ranks(4)
def test_no_rank_holds_a_whole_matrix(world: World, tmp_path: Path) -> None:
    """Neither a save nor a load needs memory for a copy of the part of the rank."""
    mesh = mesh_of(world, 1)
    first, second = Columns(mesh, 1), Columns(mesh, 2)
    other = Columns(mesh_of(world, 4), 3)
    own, whole_bytes = first.weight.numel() * 4, 2**22

    with LiveBytes() as saving:
        save(tmp_path / "new", first)
    peaks = []
    for model in (second, other):
        with LiveBytes() as loading:
            load(tmp_path / "new", model)
        peaks.append(loading.peak)

    assert own == whole_bytes // 4
    assert saving.peak < own + 2**17
    assert max(peaks) < own + 2**17
    for parameter in (second.weight, other.weight):
        assert parameter.numel() == own // 4
    expected = get_full_param(first, "weight")
    for model in (second, other):
        assert torch.equal(get_full_param(model, "weight"), expected)


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
