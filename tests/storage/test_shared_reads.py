"""Claims on loads whose replicas read a part each: each byte once, the same values."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp import LoadOptions, fully_shard, load, register_storage, save
from composable_fsdp.comm import collectives
from composable_fsdp.storage import planned as shared_reads
from composable_fsdp.storage.source import Copy
from tests.storage.test_remote import Folder
from tests.storage.test_spread import options_of
from tests.storage.training import everything, same
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

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
                mock.patch.object(shared_reads, "_SMALL", small),
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


@given(
    sizes=st.lists(st.integers(0, 4000), max_size=30),
    parts=st.integers(1, 6),
    small=st.sampled_from([1, 64, 1 << 20]),
)
def test_parts_cover_all_elements_once_and_are_about_even(
    sizes: list[int], parts: int, small: int
) -> None:
    """In order, and no part is larger than an even one and the largest tensor."""
    copies = [
        Copy(f"p{i}", None, 7, 7 + n, torch.zeros(n)) for i, n in enumerate(sizes)
    ]
    with mock.patch.object(shared_reads, "_SMALL", small):
        found = shared_reads._divided(copies, parts)
        sent = [m for part in found for m in shared_reads._messages(part)]

    cut = [copy for part in found for copy in part]
    covered = [(c.name, at) for c in cut for at in range(c.start, c.stop)]
    assert covered == [(c.name, at) for c in copies for at in range(c.start, c.stop)]
    for copy in cut:
        assert copy.into.numel() == copy.stop - copy.start
    loads = [sum(c.into.numel() for c in part) for part in found]
    whole = [n for n in sizes if 4 * n < small]
    assert max(loads) <= sum(sizes) / parts + max(whole, default=0) + 1
    assert sum(c.into.numel() for message in sent for c in message) == sum(sizes)
