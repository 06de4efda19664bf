"""Claims on the order of file system calls: what a power cut leaves behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from composable_fsdp import save
from tests.storage.training import make


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
    *before, names, renamed, name = log.calls
    assert before[:3] == [
        ("sync", str(tmp_path / "new")),
        ("sync", str(tmp_path)),
        ("sync", str(path.parent)),
    ]
    assert ("sync", f"{file} {file.stat().st_size}") in before
    assert before[-1][1].endswith(f".part {manifest.stat().st_size}")
    assert renamed[1].endswith(f" {manifest}")
    assert names == name == ("sync", str(path))
