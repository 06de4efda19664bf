"""Claims on checkpoints at URLs, and on Ctrl-C: a marker, written last, makes one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import SaveOptions, async_save, checkpoints, load, save, verify
from composable_fsdp.storage import (
    Storage,
    StoredObject,
    Upload,
    register_storage,
    remove_stale,
)
from composable_fsdp.storage import save as saving_behind
from composable_fsdp.storage import storages as fsspec_storage
from composable_fsdp.storage.save import snapshot
from composable_fsdp.storage.storages import whole_path
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World

pytest.importorskip("fsspec")


class Folder(Storage):
    """A storage as a user would write one: files, without renames of directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = 0
        self.fails_at = 0
        self.error: BaseException = ConnectionError("the network is gone")

    def _called(self, name: str) -> Path:
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.error
        return self.root / name

    def create(self, name: str) -> Upload:
        path = self._called(name)
        if path.exists():
            raise FileExistsError(name)
        return _Growing(self, name)

    def put(self, name: str, data: bytes, *, absent: bool) -> None:
        path = self._called(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if absent and path.exists():
            raise FileExistsError(name)
        path.with_suffix(".part").write_bytes(data)
        path.with_suffix(".part").replace(path)

    def read(self, name: str, begin: int, end: int) -> bytes:
        with self._called(name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def list(self, folder: str) -> Iterable[StoredObject]:
        for path in self._called(folder).rglob("*"):
            if path.is_file():
                about = path.stat()
                time = datetime.fromtimestamp(about.st_mtime, timezone.utc)
                name = str(path.relative_to(self.root))
                yield StoredObject(name, about.st_size, time)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._called(name).unlink()


class _Growing(Upload):
    """Bytes that become a file at the end, as an object does."""

    def __init__(self, storage: Folder, name: str) -> None:
        self.storage, self.name, self.data = storage, name, bytearray()

    def write(self, data: memoryview) -> None:
        self.storage._called(self.name)
        self.data += data

    def finish(self) -> None:
        self.storage.put(self.name, bytes(self.data), absent=True)

    def discard(self) -> None:
        self.data.clear()


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    """The storage of all ``own://`` URLs."""
    made = Folder(tmp_path / "own")
    register_storage("own", lambda: made)
    return made


@pytest.fixture(params=["memory", "local", "own", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, own: Folder) -> str:
    """A folder of runs in each kind of storage."""
    kind = request.param
    return {
        "memory": f"memory://{tmp_path.name}/runs",
        "local": f"local://{tmp_path}/runs",
        "own": "own://bucket/runs",
        "file": f"file://{tmp_path}/runs",
    }[kind]


def trained(steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make("plain")
    optimizer = optimizer_of(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


@pytest.mark.req("K-07")
def test_every_call_takes_a_url(url: str) -> None:
    """save, async_save, load of the newest, the list, keep, verify, overwrite."""
    model, optimizer = trained()
    for number in (8, 9, 10):
        save(
            f"{url}/step-{number}",
            model,
            optimizer,
            {"n": number},
            options=SaveOptions(keep=2),
        )
    found = checkpoints(url)
    async_save(f"{url}/step-11", model, optimizer, {"n": 11}).result()
    other, fresh = trained(0)

    extra = load(f"{url}/", other, fresh)

    assert extra == {"n": 11}
    assert same(everything(other, fresh), everything(model, optimizer))
    assert [(each.step, each.is_whole) for each in found] == [(9, True), (10, True)]
    assert found[0].path == whole_path(f"{url}/step-9")
    assert found[0].nbytes > verify(f"{url}/step-9").nbytes > 0
    assert load(f"{url}/step-9", other, fresh) == {"n": 9}
    assert verify(url).path == whole_path(f"{url}/step-11")
    text = message_of(lambda: save(f"{url}/step-11", model))
    assert "step-11 exists already, and nothing is overwritten" in text
    save(
        f"{url}/step-11",
        model,
        optimizer,
        {"n": 12},
        options=SaveOptions(overwrite=True),
    )
    assert load(url, other) == {"n": 12}
    assert remove_stale(url, dry_run=True) == []


@pytest.mark.parametrize("error", [ConnectionError("gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.req("K-03", "K-07")
def test_an_end_at_any_call_to_a_storage_leaves_the_old_or_the_new(
    own: Folder, error: BaseException, overwrite: bool
) -> None:
    """One CheckpointError, or Ctrl-C; files that a marker names are never removed, also
    after the commit, and the save can be repeated."""
    own.error, model = error, nn.Linear(3, 3)
    outcomes = set()
    for number in range(1, 60):
        base = f"own://b{number}"
        save(f"{base}/step-1", model, extra=1)
        again = partial(save, f"{base}/step-{1 if overwrite else 2}", model)
        own.calls, own.fails_at = 0, number
        options = SaveOptions(overwrite=overwrite, keep=1)
        with warnings.catch_warnings(record=True) as told, suppress(KeyboardInterrupt):
            warnings.simplefilter("always")
            text = message_of(partial(again, extra=2, options=options))
        was_reached, own.fails_at = own.calls >= number, 0
        found = load(base, model)
        outcomes.add(found)
        if isinstance(error, ConnectionError):
            # After the commit a failure is a warning, or is not told.
            raised = text.startswith("CheckpointError: ")
            assert raised == (text != "nothing was raised") == (found == 1), text
            assert all("committed" in str(each.message) for each in told)
        again(extra=3, options=SaveOptions(overwrite=True))
        assert load(base, model) == 3
        assert all(each.is_whole for each in checkpoints(base))
        if not was_reached:
            break
    assert outcomes == {1, 2}


def test_an_interrupt_after_the_commit_leaves_the_new(own: Folder) -> None:
    """The marker is there, and the caller does not know."""
    put, model = own.put, nn.Linear(3, 3)

    def put_and_press(name: str, data: bytes, *, absent: bool) -> None:
        put(name, data, absent=absent)
        if name.endswith("manifest.json"):
            raise KeyboardInterrupt

    with mock.patch.object(own, "put", put_and_press), pytest.raises(KeyboardInterrupt):
        save("own://last/step-1", model, extra=5)
    assert load("own://last", model) == 5


def test_of_two_saves_that_overwrite_one_url_the_later_commit_keeps_a_whole_one(
    own: Folder,
) -> None:
    """The first commit removes the other's files, and the other commits nothing."""
    model, _ = trained(0)
    save("own://b/step-1", model, extra="old")
    listed, late = own.list, [False]

    def between(folder: str) -> Iterable[StoredObject]:
        # The last question before the marker; the files of ``second`` are there.
        if late[0] and len(list(listed(folder))) == 3:
            late[0] = False
            save(
                "own://b/step-1",
                model,
                extra="first",
                options=SaveOptions(overwrite=True),
            )
        return listed(folder)

    late[0] = True
    own.list = between  # type: ignore[method-assign]  # for this test
    again = partial(
        save,
        "own://b/step-1",
        model,
        extra="second",
        options=SaveOptions(overwrite=True),
    )
    text = message_of(again)

    assert "was written with" in text
    assert "and nothing is there; nothing was committed" in text
    assert load("own://b", model) == "first"
    assert verify("own://b")


@given(nbytes=st.integers(0, 5 << 40))
@example(nbytes=160 * 10**9)
def test_a_file_of_any_size_goes_up_in_parts_that_a_store_takes(nbytes: int) -> None:
    """S3 takes 10,000 parts: of 16 MiB each, a file of 168 GB failed at its end."""
    files = mock.Mock()
    upload = fsspec_storage._FsspecUpload(files, "b/file")
    upload.expect(nbytes)
    upload.write(memoryview(b"first"))

    ((name, mode), options) = files.open.call_args
    size = options["block_size"]
    # A header and the last bytes of a write come on top.
    assert (nbytes + (100 << 20)) / size < 10_000
    assert size % (1 << 20) == 0
    assert 16 << 20 <= size <= max(16 << 20, nbytes // 8_000)
    assert (name, mode) == ("b/file", "wb")


@on_ranks(2, 3)
@pytest.mark.req("K-07")
def test_ranks_save_and_load_at_a_url(world: World, tmp_path: Path) -> None:
    """Through fsspec, as with a directory; memory is refused on every rank."""
    url = f"local://{tmp_path}/runs"
    model = make("composable")
    optimizer = optimizer_of(model)
    for number in (1, 2):
        step(model, optimizer, number)
        save(
            f"{url}/step-{number}",
            model,
            optimizer,
            number,
            options=SaveOptions(keep=1),
        )
    other = make("wrapper", seed=3)
    fresh = optimizer_of(other)

    assert load(url, other, fresh) == 2
    assert same(everything(other, fresh), everything(model, optimizer))
    assert sorted(os.listdir(tmp_path / "runs" / "step-2"))[0] == "manifest.json"
    assert len(os.listdir(tmp_path / "runs" / "step-2")) == world.world_size + 1
    text = message_of(lambda: save("memory://runs/step-1", model))
    assert "lies in the memory of a single process" in text


@on_ranks(2)
@pytest.mark.req("K-06")
def test_an_interrupt_while_values_are_copied_ends_the_save_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    """The rank raises at once, other futures end, and the next save goes on."""
    model = make("composable")
    optimizer = optimizer_of(model)

    def copied(*args: Any) -> Any:
        if world.rank == 1:
            raise KeyboardInterrupt
        return snapshot(*args)

    with mock.patch.object(saving_behind, "snapshot", copied):
        if world.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                async_save(tmp_path / "step-1", model, optimizer)
        else:
            future = async_save(tmp_path / "step-1", model, optimizer)
            text = message_of(future.result)
            assert "rank 1" in text
            assert "async_save was interrupted (KeyboardInterrupt())" in text
    save(tmp_path / "step-2", model, optimizer, extra=2)
    assert load(tmp_path, model, optimizer) == 2
    assert sorted(os.listdir(tmp_path)) == ["step-2"]
