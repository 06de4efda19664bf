"""Claims on replicas: each byte is written once, by about even parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composable_fsdp import (
    LoadOptions,
    ShardingStrategy,
    async_save,
    load,
    save,
    verify,
)
from composable_fsdp.storage import (
    free_save_memory,
    part,
    save_parts,
)
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


def check_load(world: World, name: Path, expected: Any) -> bool:
    model = make("wrapper", seed=5)
    optimizer = optimizer_of(model)
    load(name, model, optimizer, options=LoadOptions(rng=False))
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
    for world_size, name in ((1, "step-1"), (2, "step-2"), (3, "step-1")):
        again = ranks(world_size).run(check_load, tmp_path / name, expected)
        assert again == [True] * world_size


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
    assert ranks(2).run(check_load, tmp_path / "run", expected) == [True] * 2


def expected_names() -> list[tuple[str, ...]]:
    """The names of a plain model's tensors as one rank saves them."""
    return [held.names for held in contents_of(make("plain"), "save").tensors]
