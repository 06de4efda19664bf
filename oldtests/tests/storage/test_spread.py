"""Claims on replicas: each byte is written once, and read once, by about even parts."""

from __future__ import annotations

import threading
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
    fully_shard,
    load,
    save,
    verify,
)
from composable_fsdp.comm import collectives
from composable_fsdp.storage import (
    free_save_memory,
    part,
    register_storage,
    save_parts,
    team,
)
from composable_fsdp.storage.contents import contents_of
from composable_fsdp.storage.native import NativeSource
from tests.storage.test_remote import Folder
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.on_ranks import on_ranks
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
        for world_size in (1, 2, 3):
            options: dict[str, Any] = {}
            again = ranks(world_size).run(
                check_load, tmp_path / name, expected, options
            )
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
    assert ranks(2).run(check_load, tmp_path / "run", expected, {}) == [True] * 2


def expected_names() -> list[tuple[str, ...]]:
    """The names of a plain model's tensors as one rank saves them."""
    return [held.names for held in contents_of(make("plain"), "save").tensors]


pytest.importorskip("fsspec")


class Counting(Folder):
    """A storage that counts the bytes of files that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.nbytes = 0
        self._lock = threading.Lock()

    def read(self, name: str, begin: int, end: int) -> bytes:
        data = super().read(name, begin, end)
        if name.endswith(".safetensors"):
            with self._lock:
                self.nbytes += len(data)
        return data


def counting(folder: Path) -> Counting:
    storage = Counting(folder)
    register_storage("own", lambda: storage)
    return storage


def large(mesh: tuple[int, int], seed: int = 0) -> tuple[Any, Any]:
    """A sharded model of 1 MB in units, with a buffer, and an optimizer."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(256, 256, bias=i > 0) for i in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(256))
    for layer in layers[1:]:
        fully_shard(layer, **options_of(mesh))
    fully_shard(model, **options_of(mesh))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, at: int) -> None:
    """A step on the same values on every rank."""
    torch.manual_seed(at)
    model(torch.rand(4, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(mesh: tuple[int, int]) -> tuple[Any, Any]:
    """A model with its optimizer, saved at ``own://b``."""
    model, optimizer = large(mesh)
    train(model, optimizer, 0)
    save("own://b/step-1", model, optimizer, extra=3)
    return model, optimizer


def check_bytes(
    world: World, folder: Path, mesh: tuple[int, int], small: int
) -> dict[Any, tuple[int, bool, int]]:
    """Per value of ``share``: bytes read here, whether all came back, bytes sent."""
    storage = counting(folder)
    model, optimizer = saved(mesh)
    expected = everything(model, optimizer)
    found: dict[Any, tuple[int, bool, int]] = {}
    for share in (False, True, None):
        # Over values that are there, and into an optimizer before its first step.
        for is_new in (False, True):
            other, fresh = large(mesh, seed=7)
            if not is_new:
                train(other, fresh, 1)
            storage.nbytes = 0
            with (
                collectives.record() as calls,
                mock.patch.object(team, "_SMALL", small),
            ):
                extra = load("own://b", other, fresh, options=LoadOptions(share=share))
            is_same = extra == 3 and same(everything(other, fresh), expected)
            sent = sum(each.op == "broadcast" for each in calls)
            found[share, is_new] = storage.nbytes, is_same, sent
    return found


@pytest.mark.few(1)
@pytest.mark.req("K-05")
@pytest.mark.parametrize("small", [1 << 12, 1 << 20])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)], ids=str)
def test_replicas_read_each_byte_once_and_get_the_same_values(
    ranks: RankCount, tmp_path: Path, mesh: tuple[int, int], small: int
) -> None:
    """Without sharing each replica reads all that it holds."""
    replicas = mesh[0]
    found = ranks(mesh[0] * mesh[1]).run(check_bytes, tmp_path / "own", mesh, small)

    for per_rank in found:
        for is_new in (False, True):
            alone, is_same, sent = per_rank[False, is_new]
            assert is_same
            assert not sent
            for share in (True, None):
                nbytes, is_same, sent = per_rank[share, is_new]
                assert is_same
                assert sent
                # A part of all, with blocks that two ranks touch, and headers; with a
                # tensor that is not cut.
                uncut = 4 * 256 * 256 if small > 1 << 12 else 0
                assert nbytes < alone / replicas + 150_000 + uncut
    total = sum(each[True, False][0] for each in found)
    assert total < sum(each[False, False][0] for each in found) / replicas + 500_000


@on_ranks(3)
@pytest.mark.req("K-05", "K-02")
def test_damage_that_a_single_reader_finds_is_told_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    """The tensors of every rank, also of those that have read good bytes, stay."""
    storage = counting(tmp_path / "own")
    model, optimizer = saved((3, 1))
    if world.rank == 0:
        file = max((tmp_path / "own/b/step-1").glob("rank*"))
        data = bytearray(file.read_bytes())
        data[-5000] ^= 1
        file.write_bytes(data)
    world.barrier()
    train(model, optimizer, 1)
    before = everything(model, optimizer)

    text = message_of(lambda: load("own://b", model, optimizer))

    assert "another checksum than the manifest says" in text
    assert same(everything(model, optimizer), before)
    assert storage.nbytes


@on_ranks(2)
@pytest.mark.req("K-05", "K-07")
def test_a_rank_whose_storage_fails_ends_the_load_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    """At any of its calls, also at the question whether the checkpoint is gone."""
    storage = counting(tmp_path / "own")
    model, optimizer = saved((2, 1))
    failed = 0

    def fails(name: str) -> Path:
        nonlocal failed
        storage.calls += 1
        if world.rank and storage.calls >= storage.fails_at:
            failed += 1
            raise ConnectionError(5, "the network is gone")
        return storage.root / name

    with mock.patch.object(storage, "_called", fails):
        for at in (1, 2, 3, 5):
            storage.calls, storage.fails_at = 0, at
            before = everything(model, optimizer)
            text = message_of(lambda: load("own://b", model, optimizer))
            assert "the network is gone" in text
            assert same(everything(model, optimizer), before)
    assert failed or not world.rank
