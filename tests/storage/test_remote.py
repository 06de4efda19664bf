"""Claims on checkpoints at URLs: a marker that is written last makes a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import (
    SaveOptions,
    Storage,
    StoredObject,
    Upload,
    async_save,
    checkpoints,
    load,
    register_storage,
    remove_stale,
    save,
    verify,
)
from composable_fsdp.storage import storages as fsspec_storage
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

    def _called(self, name: str) -> Path:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ConnectionError("the network is gone")
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


@pytest.mark.req("K-07", "K-03")
def test_a_storage_that_fails_at_any_call_leaves_the_old_or_the_new(
    own: Folder,
) -> None:
    """One CheckpointError, which names the object; the save can be repeated."""
    model, _ = trained(0)
    failed = 0
    for number in range(1, 60):
        base = f"own://b{number}"
        save(f"{base}/step-1", model, extra=1)
        target = f"{base}/step-1"
        own.calls, own.fails_at = 0, number
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            again = partial(
                save, target, model, extra=2, options=SaveOptions(overwrite=True)
            )
            text = message_of(again)
        was_reached, own.fails_at = own.calls >= number, 0
        if not was_reached:
            break
        # After the commit a failure is a warning, or is not told.
        committed = text == "nothing was raised"
        assert committed or text.startswith("CheckpointError: "), text
        assert load(base, model) == (2 if committed else 1)
        assert all("committed" in str(each.message) for each in told)
        failed += not committed
        save(target, model, extra=3, options=SaveOptions(overwrite=True))
        assert load(base, model) == 3
        assert all(each.is_whole for each in checkpoints(base))
    assert failed > 3


@pytest.mark.req("K-07", "K-03")
def test_files_without_a_marker_are_no_checkpoint_and_can_be_removed(url: str) -> None:
    """As a process leaves them that dies between two files."""
    if url.startswith("file"):
        pytest.skip("test_crash.py has the same of a directory")
    model, _ = trained(0)
    save(f"{url}/step-1", model, extra=1)
    save(f"{url}/step-2", model, extra=2)
    from composable_fsdp.storage.storages import storage_of

    storage, name = storage_of(f"{url}/step-2/manifest.json")
    storage.delete(name)

    assert load(url, model) == 1
    assert [each.step for each in checkpoints(url)] == [1]
    assert remove_stale(url, dry_run=True) == [f"{url}/step-2"]
    text = message_of(lambda: load(f"{url}/step-2", model))
    assert "step-2 holds nothing, and no checkpoint" in text
    # The same save again is not in the way of what was left, and removes it.
    save(f"{url}/step-2", model, extra=3)
    assert load(url, model) == 3
    assert len(list(storage.list(storage_of(f"{url}/step-2")[1]))) == 2
    storage.delete(name)
    assert remove_stale(url) == [f"{url}/step-2"]
    assert remove_stale(url, dry_run=True) == []
    assert load(url, model) == 1


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


@pytest.mark.req("K-03", "K-07")
def test_a_marker_that_was_written_in_part_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of fsspec, where a file grows under its name."""
    import fsspec

    url = f"local://{tmp_path}/runs"
    model, _ = trained(0)
    save(f"{url}/step-1", model, extra=1)
    files = type(fsspec.filesystem("local"))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    # The process ends between the last byte of the marker and the rename.
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(files, "mv", dies)
        patched.setattr(files, "rm_file", dies)
        save(f"{url}/step-2", model, extra=2)

    left = sorted(os.listdir(tmp_path / "runs" / "step-2"))
    assert [name.startswith("manifest.json.") for name in left] == [True, False]
    assert load(url, model) == 1
    assert remove_stale(url, dry_run=True) == [f"{url}/step-2"]
    save(f"{url}/step-2", model, extra=3)
    assert load(url, model) == 3
    assert len(os.listdir(tmp_path / "runs" / "step-2")) == 2


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
