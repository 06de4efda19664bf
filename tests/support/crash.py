"""Kills the process at a point of a save, as a power failure would."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from composable_fsdp.storage import save, writer
from composable_fsdp.storage.writer import NewFile

POINTS = ("before-write", "mid-file", "after-write", "before-rename", "after-rename")


@contextmanager
def killed_at(point: str, rank: int) -> Iterator[None]:
    """Kill this process when a save inside the block reaches ``point``.

    ``mid-file:1`` kills rank 1 only, ``mid-file`` every rank that reaches the point. If
    ``point`` is empty, nothing is killed. Saves in a thread are killed, too.
    """
    wanted, _, which = point.partition(":")
    if which not in ("", str(rank)):
        wanted = ""
    write = _around(writer.write_file, "write", wanted)
    replace = _around(os.replace, "rename", wanted)
    file = _HalfFile if wanted == "mid-file" else NewFile
    with (
        mock.patch.object(save, "write_file", write),
        mock.patch.object(os, "replace", replace),
        mock.patch.object(writer, "NewFile", file),
    ):
        yield


def _around(call: Callable[..., Any], name: str, wanted: str) -> Callable[..., Any]:
    """Return ``call``, with death before or after if the point is ``wanted``."""

    def called(*args: Any) -> Any:
        if wanted == f"before-{name}":
            _die()
        result = call(*args)
        if wanted == f"after-{name}":
            _die()
        return result

    return called


class _HalfFile(NewFile):
    """Dies after the header and the first part of the payload."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.parts = 0

    def write(self, data: memoryview) -> None:
        super().write(data)
        self.parts += 1
        if self.parts == 2:
            self._file.flush()
            _die()


def _die() -> None:
    # SIGKILL and not an exception: no handler runs and no buffer is flushed.
    os.kill(os.getpid(), signal.SIGKILL)
