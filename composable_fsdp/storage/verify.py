"""Reading a whole native checkpoint to say whether every byte of it is good."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.blocks import ReadRequest
from composable_fsdp.storage.directory import LATEST, MANIFEST, follow_latest
from composable_fsdp.storage.manifest import BLOCK
from composable_fsdp.storage.native import NativeSource

Progress = Callable[[int, int], object]
"""Is called with the bytes read so far and those there are."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``verify`` found; true if the checkpoint is good.

    ``path`` is the checkpoint, also where its parent was asked about. ``problems`` are
    whole sentences that name file, parameter and box. ``nbytes`` were read.
    """

    path: str
    problems: tuple[str, ...]
    files: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: good ({self.files} files, {self.nbytes} bytes)"
        return "\n".join([f"{self.path}: damaged", *self.problems])


def verify(
    path: str | os.PathLike[str], *, progress: Progress | None = None
) -> Verification:
    """Check a native checkpoint from end to end: manifest, sizes, every checksum.

    ``path`` is the checkpoint, or a directory whose file ``latest`` names one. Every
    file is read, one block of 4 MiB at a time. No process group is needed and nothing
    is sent; damage is reported, not raised.

    >>> assert verify("runs/step-100")
    """
    path = os.path.abspath(path)
    problems: list[str] = []
    files, done = 0, 0
    try:
        if not os.path.lexists(os.path.join(path, MANIFEST)) and os.path.isfile(
            os.path.join(path, LATEST)
        ):
            path = follow_latest(path)
        with NativeSource(path, values=False) as source:
            total = sum(file.payload_nbytes for file in source.manifest.files)
            for reader in source.files:
                files += 1
                size = reader.file.payload_nbytes
                for begin in range(0, max(size, 1), BLOCK):
                    end = min(begin + BLOCK, size)
                    try:
                        reader.check([ReadRequest(begin, end, None, 0, ())])
                    except CheckpointError as error:
                        problems.append(_text(error))
                        if not reader.is_open:
                            break
                    done += end - begin
                    if progress is not None:
                        progress(done, total)
    except CheckpointError as error:
        problems.append(_text(error))
    return Verification(path, tuple(problems), files, done)


def _text(error: CheckpointError) -> str:
    return str(error.args[0])
