"""Claims on saves with replicas: each byte once, by ranks that write about the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import (
    ShardingStrategy,
    async_save,
    free_save_memory,
    fully_shard,
    load,
    save,
    verify,
)
from composable_fsdp.storage import part, save_parts
from composable_fsdp.storage.contents import contents_of
from composable_fsdp.storage.native import NativeSource
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


@contextmanager
def small_parts(nbytes: int = 16) -> Iterator[None]:
    """Divide even small shards, and tensors in no unit."""
    with (
        mock.patch.object(save_parts, "SMALLEST_PART", nbytes),
        mock.patch.object(part, "SMALL", nbytes),
    ):
        yield


def hybrid(replicas: int, shards: int) -> Any:
    """A mesh of so many replicas of so many shards."""
    return torch.distributed.device_mesh.init_device_mesh(
        "cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")
    )


def options_of(mesh: tuple[int, int]) -> dict[str, Any]:
    """The options of a model on a mesh; with a single shard, those of ``NO_SHARD``."""
    if mesh[1] == 1:
        return {"strategy": ShardingStrategy.NO_SHARD}
    return {"device_mesh": hybrid(*mesh)}


def check_save(world: World, folder: Path, mesh: tuple[int, int]) -> list[Any]:
    with small_parts():
        model = make("composable", **options_of(mesh))
        optimizer = optimizer_of(model)
        for at in range(2):
            step(model, optimizer, at)
        save(folder / "step-1", model, optimizer)
        async_save(folder / "step-2", model, optimizer).result()
    return [everything(model, optimizer), free_save_memory(model)]


def check_load(
    world: World, name: Path, expected: Any, options: dict[str, Any]
) -> bool:
    model = make("wrapper", seed=5, **options)
    optimizer = optimizer_of(model)
    load(name, model, optimizer, rng=False)
    return same(everything(model, optimizer), expected)


MESHES = [(2, 2), (3, 1)]


@pytest.mark.few(1)
@pytest.mark.req("K-05", "S3-06")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replicas_divide_the_bytes_and_any_world_reads_them(
    ranks: RankCount, tmp_path: Path, mesh: tuple[int, int]
) -> None:
    """Both saves come back on one to three ranks, and no rank writes the most of it."""
    found = ranks(mesh[0] * mesh[1]).run(check_save, tmp_path, mesh)
    expected = found[0][0]

    assert all(same(saved, expected) for saved, _ in found)
    for name in ("step-1", "step-2"):
        assert verify(tmp_path / name)
        with NativeSource(tmp_path / name) as source:
            sizes = [file.payload_nbytes for file in source.manifest.files]
            tensors = source.manifest.tensors
            writers = {len({at.file for at in each.parts}) for each in tensors}
        # Random states are on every rank: 20 KiB.
        own = [size - 20_000 for size in sizes]
        assert max(own) < 1.25 * min(own)
        # Large parameters are cut.
        assert mesh[0] * mesh[1] in writers
        for world_size in (1, 2, 3):
            options: dict[str, Any] = {}
            again = ranks(world_size).run(
                check_load, tmp_path / name, expected, options
            )
            assert again == [True] * world_size


class Uneven(nn.Module):
    """A unit with a parameter that no loss uses, so its optimizer state is missing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.unused = nn.Parameter(torch.randn(31))
        self.none = nn.Parameter(torch.empty(0, 2))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        return out


def check_uneven(world: World, folder: Path, mesh: tuple[int, int]) -> list[bool]:
    with small_parts():
        models = []
        for seed in (1, 2):
            model = fully_shard(Uneven(seed), **options_of(mesh))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            models.append((model, optimizer))
        model, optimizer = models[0]
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(folder / "whole", model, optimizer)
        save(folder / "part", model, optimizer, include=["first", "unused"])
        again, other = models[1]
        load(folder / "part", again, other, include=["first", "unused"])
        part = again.state_dict()
        expected = model.state_dict()
        chosen = [n for n in expected if n.split(".")[0] in ("first", "unused")]
        is_part = all(torch.equal(part[n], expected[n]) for n in chosen)
        load(folder / "whole", again, other)
    return [is_part, same(everything(again, other), everything(model, optimizer))]


@pytest.mark.req("K-05")
@pytest.mark.parametrize("mesh", [(2, 2), (2, 1)], ids=str)
def test_states_that_some_parameters_lack_are_saved_by_replicas(
    ranks: RankCount, tmp_path: Path, mesh: tuple[int, int]
) -> None:
    """Also empty parameters, and a save of some parameters of the unit."""
    count = mesh[0] * mesh[1]
    assert ranks(count).run(check_uneven, tmp_path, mesh) == [[True, True]] * count
    with NativeSource(tmp_path / "part") as source:
        places = [at.file for each in source.manifest.tensors for at in each.parts]
    assert len(set(places)) > 1


def check_plain(world: World, folder: Path) -> list[Any]:
    model = make("plain")
    optimizer = optimizer_of(model)
    with small_parts():
        step(model, optimizer, 0)
        save(folder / "run", model, optimizer)
        with torch.no_grad():
            model.get_parameter("scale").add_(world.rank)
        text = message_of(lambda: save(folder / "unequal", model, optimizer))
        with torch.no_grad():
            model.get_parameter("scale").sub_(world.rank)
    return [everything(model, optimizer), text]


@pytest.mark.req("K-01", "K-05")
def test_large_parameters_in_no_unit_are_divided(
    ranks: RankCount, tmp_path: Path
) -> None:
    """In the order of the model; values that differ are refused as ever."""
    found = ranks(2).run(check_plain, tmp_path)

    expected, text = found[0]
    assert "'scale'" in text
    with NativeSource(tmp_path / "run") as source:
        tensors = source.manifest.tensors
        sizes = [file.payload_nbytes for file in source.manifest.files]
    buffers = [each for each in tensors if each.fqns == ("seen",)]
    assert [each.parts[0].file for each in buffers] == [0]
    assert [each.fqns for each in tensors] == expected_names()
    assert max(sizes) < 1.3 * min(sizes)
    assert ranks(2).run(check_load, tmp_path / "run", expected, {}) == [True] * 2


def expected_names() -> list[tuple[str, ...]]:
    """The names of a plain model's tensors as one rank saves them."""
    return [held.names for held in contents_of(make("plain"), "save").tensors]


def check_state_of_a_replica(world: World, folder: Path) -> str:
    model = make("composable", strategy=ShardingStrategy.NO_SHARD)
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    if world.rank == 1:
        optimizer.state.clear()
    with small_parts():
        return message_of(lambda: save(folder / "run", model, optimizer))


@pytest.mark.req("K-01")
def test_a_replica_without_its_state_is_an_error_on_all(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Its part of the state would be zeros; nothing is committed."""
    texts = ranks(2).run(check_state_of_a_replica, tmp_path)

    assert texts[0] == texts[1]
    assert texts[0].startswith("CheckpointError: ")
    assert " on rank 0 and absent on rank 1, which hold copies of" in texts[0]
    assert not (tmp_path / "run").exists()
