"""A restart is a loop that ends: each crash leaves a checkpoint to load and save on."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import (
    LoadOptions,
    SaveOptions,
    async_save,
    checkpoints,
    load,
    save,
    verify,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage import commit
from composable_fsdp.storage import save as saving
from composable_fsdp.storage.directory import MANIFEST, open_plain
from tests.storage.training import make, optimizer_of
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

CALLS = ("open", "write", "mkdir", "rename", "replace", "unlink", "fsync", "rmdir")


def model(value: float) -> nn.Linear:
    made = nn.Linear(2, 2)
    with torch.no_grad():
        made.weight.fill_(value)
        # Equal on all ranks.
        made.bias.zero_()
    return made


def value_in(path: Path) -> float:
    made = model(-1)
    load(path, made, options=LoadOptions(rng=False))
    return made.weight[0, 0].item()


@contextmanager
def at_call(number: int, act: Any, *more: str) -> Iterator[list[int]]:
    """Call ``act`` after the system call ``number`` of ``CALLS`` and ``more``."""
    count = [0]
    with ExitStack() as stack:
        for name in (*CALLS, *more):
            real = getattr(os, name)

            def called(*args: Any, _real: Any = real, **options: Any) -> Any:
                result = _real(*args, **options)
                count[0] += 1
                if count[0] == number:
                    act()
                return result

            stack.enter_context(mock.patch.object(os, name, called))
        yield count


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_save(path: Path, number: int, how: str) -> bool:
    """Save 3.0 in a process that dies after a system call; whether the process died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if not child:
        with at_call(number, die):
            options = SaveOptions(keep=3, overwrite=how == "overwrite")
            if how == "async":
                async_save(path, model(3.0), options=options).result()
            else:
                save(path, model(3.0), options=options)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.few(2)
@pytest.mark.req("K-03", "X-04")
@pytest.mark.parametrize("how", ["async", "new", "overwrite"])
def test_after_a_crash_at_any_system_call_a_run_goes_on(
    how: str, tmp_path: Path
) -> None:
    """Load takes the newest whole checkpoint, and the same save can be repeated."""
    found = []
    overwrite = how == "overwrite"
    for number in range(1, 200):
        runs = tmp_path / str(number)
        save(runs / "step-1", model(1.0))
        if overwrite:
            save(runs / "step-2", model(2.0))
        died = killed_save(runs / "step-2", number, how)

        value = value_in(runs)
        assert verify(runs)
        assert value in (3.0, 2.0 if overwrite else 1.0)
        found.append(value)
        # What was loaded stays in the list or is finished by this save.
        save(runs / "step-2", model(4.0), options=SaveOptions(overwrite=True))
        assert value_in(runs) == 4.0
        assert [(each.step, each.is_whole) for each in checkpoints(runs)] == [
            (1, True),
            (2, True),
        ]
        assert len(os.listdir(runs / "step-2")) == 2
        if not died:
            break
    # Once the new checkpoint is found, no later crash loses it.
    assert found == sorted(found)
    assert found[0] != 3.0
    assert found[-1] == 3.0
    assert found.count(3.0) > 3


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.req("K-04", "K-03")
def test_a_commit_is_told_as_it_is_whatever_call_fails(tmp_path: Path) -> None:
    """An error says that the checkpoint is there if it is; the next save succeeds."""
    both = set()
    for number in range(1, 200):
        runs = tmp_path / str(number)
        with at_call(number, lambda: fail(errno.EIO)) as count:
            text = ""
            try:
                save(runs / "step-1", model(3.0))
            except CheckpointError as error:
                text = str(error)
        if count[0] < number:
            break
        # The error of a call that had an effect is the hardest case.
        there = (runs / "step-1" / "manifest.json").exists()
        assert there == (not text or "committed and is whole" in text), (number, text)
        both.add(there)
        if there:
            assert value_in(runs) == 3.0
        save(runs / "step-2", model(4.0))
        assert value_in(runs) == 4.0
    assert both == {True, False}


@pytest.mark.req("X-23")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", ["save", "load"])
def test_the_error_of_each_system_call_names_a_file(act: str, tmp_path: Path) -> None:
    """Whichever call of a save or load fails, as calls on descriptors do."""
    save(tmp_path / "step-1", model(1.0))

    def call(path: Path) -> Any:
        return save(path, model(2.0)) if act == "save" else load(tmp_path, model(2.0))

    failed, eio = 0, partial(fail, errno.EIO)
    for number in range(1, 200):
        target = tmp_path / f"try-{number}" / "x"
        with at_call(number, eio, "close", "preadv", "pread") as count:
            text = message_of(partial(call, target))
        if count[0] < number:
            break
        if text != "nothing was raised":
            assert text.startswith("CheckpointError: ")
            assert str(tmp_path) in text
            failed += 1
    assert failed >= (10 if act == "save" else 3)
    assert verify(tmp_path / "step-1")


@on_ranks(2)
@pytest.mark.req("K-04")
def test_where_warnings_are_errors_the_error_says_that_the_save_has_succeeded(
    world: World, tmp_path: Path
) -> None:
    """On all ranks, which are in step for the next save; it told of ``latest``."""
    held = mock.patch("os.unlink", side_effect=OSError(errno.EBUSY, "held"))
    save(tmp_path / "step-1", model(1.0))
    with held, warnings.catch_warnings():
        warnings.simplefilter("error")
        text = message_of(
            lambda: save(tmp_path / "step-2", model(2.0), options=SaveOptions(keep=1))
        )

    assert "On rank 0:" in text
    assert "step-2 was committed; older checkpoints could not be removed" in text
    assert "the save itself has succeeded, and training can go on" in text
    assert value_in(tmp_path) == 2.0
    save(tmp_path / "step-3", model(3.0), options=SaveOptions(keep=1))
    assert value_in(tmp_path) == 3.0
    if world.rank == 0:
        assert sorted(os.listdir(tmp_path)) == ["step-3"]


@pytest.mark.req("X-05")
def test_a_save_that_commits_in_between_is_not_written_over(tmp_path: Path) -> None:
    """Both began when there was no manifest; the later commit is refused."""
    waiting = [partial(save, tmp_path / "step-1", model(2.0))]
    real = vars(saving)["write_file"]

    def between(*args: Any) -> Any:
        if waiting:
            waiting.pop()()
        return real(*args)

    with mock.patch.object(saving, "write_file", between):
        text = message_of(lambda: save(tmp_path / "step-1", model(3.0)))

    assert "step-1 exists already, and nothing is overwritten" in text
    assert value_in(tmp_path) == 2.0
    assert verify(tmp_path / "step-1")


@pytest.mark.req("K-03")
def test_a_save_is_the_newest_also_after_a_clock_that_was_ahead(tmp_path: Path) -> None:
    """The save looks into the last manifest alone."""
    for at in (1, 2, 3):
        with mock.patch("time.time_ns", return_value=4 * 10**18 + at):
            save(tmp_path / f"step-{at}", model(float(at)))

    with mock.patch.object(commit, "open_plain", wraps=open_plain) as opened:
        save(tmp_path / "step-4", model(4.0))

    assert opened.call_count == 1
    assert value_in(tmp_path) == 4.0


@pytest.mark.req("K-03")
def test_saves_are_the_newest_also_after_a_clock_that_was_set_back(
    tmp_path: Path,
) -> None:
    """The times of files are out of order then; so may be the numbers of a rerun."""
    ahead = 4 * 10**18
    with mock.patch("time.time_ns", return_value=ahead):
        save(tmp_path / "step-9", model(9.0))
    os.utime(tmp_path / "step-9" / MANIFEST, ns=(ahead, ahead))

    for number in (3, 2):
        save(tmp_path / f"step-{number}", model(float(number)))
        assert value_in(tmp_path) == number


@pytest.mark.req("K-04")
def test_keep_removes_checkpoints_of_the_same_series_alone(tmp_path: Path) -> None:
    """A series differs in the last number; none newer by that number is removed."""
    names = ["seed1-step-1", "seed1-step-2", "lr0.1-step-9", "seed2-step-9", "best"]
    for name in names:
        save(tmp_path / name, model(1.0))
    os.utime(tmp_path / "seed1-step-1" / "manifest.json")

    save(tmp_path / "seed2-step-1", model(2.0), options=SaveOptions(keep=1))
    save(tmp_path / "seed1-step-10", model(2.0), options=SaveOptions(keep=2))

    gone = {"seed1-step-1"}
    kept = {*names, "seed2-step-1", "seed1-step-10"} - gone
    assert set(os.listdir(tmp_path)) == kept


@pytest.mark.req("K-03")
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupt_after_any_system_call_leaves_the_newest_to_load(
    tmp_path: Path, overwrite: bool
) -> None:
    """Where the new directory has its name, a load of the folder takes that one."""
    for number in range(1, 60):
        runs = tmp_path / str(number)
        name = runs / ("step-1" if overwrite else "step-2")
        runs.mkdir()
        save(runs / "step-1", model(1.0))
        died = False
        with at_call(number, _interrupt):
            try:
                save(name, model(3.0), options=SaveOptions(overwrite=overwrite))
            except KeyboardInterrupt:
                died = True
        found = value_in(runs)
        assert found in (1.0, 3.0)
        if found == 1.0:
            assert overwrite or not (name / "manifest.json").exists()
        if not died:
            break
        save(name, model(4.0), options=SaveOptions(overwrite=True))
        assert value_in(runs) == 4.0
    assert number > 8


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def save_first(world: World, folder: Path) -> None:
    model = make("composable")
    save(folder / "step-1", model, optimizer_of(model))


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def save_again(world: World, folder: Path) -> str:
    return message_of(lambda: save(folder / "step-1", make("wrapper", seed=3)))


@pytest.mark.req("X-05", "D-18")
def test_an_existing_name_is_never_written_over(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Refused before a byte is written, so no crash can mix old and new files."""
    ranks(2).run(save_first, tmp_path)
    old = bytes_below(tmp_path / "step-1")

    for text in ranks(2).run(save_again, tmp_path):
        assert "step-1 exists already, and nothing is overwritten" in text

    assert bytes_below(tmp_path / "step-1") == old
    assert sorted(os.listdir(tmp_path)) == ["step-1"]


class Log:
    """Syncs and renames, by path, and what had been written and not synced before."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._fsync, self._rename, self._replace = os.fsync, os.rename, os.replace

    def fsync(self, handle: int) -> None:
        self._fsync(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        size = os.fstat(handle).st_size
        self.calls.append(("sync", path if os.path.isdir(path) else f"{path} {size}"))

    def rename(self, source: Any, target: Any) -> None:
        self.calls.append(("rename", f"{os.fspath(source)} {os.fspath(target)}"))
        self._rename(source, target)

    def replace(self, source: Any, target: Any) -> None:
        self.calls.append(("rename", f"{os.fspath(source)} {os.fspath(target)}"))
        self._replace(source, target)


@contextmanager
def logged() -> Iterator[Log]:
    log = Log()
    with (
        mock.patch("os.fsync", log.fsync),
        mock.patch("os.rename", log.rename),
        mock.patch("os.replace", log.replace),
    ):
        yield log


@pytest.mark.req("X-04")
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for a file's path")
def test_all_files_are_on_the_disk_before_the_manifest_has_its_name(
    tmp_path: Path,
) -> None:
    """The parents that a save makes, files, names, rename, and the new name."""
    path = tmp_path / "new" / "runs" / "step-1"

    with logged() as log:
        save(path, make("plain"))

    (file,) = path.glob("rank*")
    manifest = path / "manifest.json"
    *before, names, renamed, name, parent = log.calls
    assert before[:2] == [("sync", str(tmp_path / "new")), ("sync", str(tmp_path))]
    assert ("sync", f"{file} {file.stat().st_size}") in before
    assert before[-1][1].endswith(f".part {manifest.stat().st_size}")
    assert renamed[1].endswith(f" {manifest}")
    assert names == name == ("sync", str(path))
    assert parent == ("sync", str(path.parent))
