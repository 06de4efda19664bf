"""Reads a whole native checkpoint and verifies every byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.blocks import ReadRequest
from composable_fsdp.storage.commit import newest_in
from composable_fsdp.storage.directory import MANIFEST, no_checkpoint_text
from composable_fsdp.storage.manifest import BLOCK
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.opening import find_checkpoint
from composable_fsdp.storage.remote import is_url, whole_path

Progress = Callable[[int, int], object]
"""A callback that gets the number of bytes read so far, and of all bytes."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``; true in a condition if the checkpoint is good."""

    path: str
    """The checkpoint, also if ``verify`` was called with the parent directory."""
    problems: tuple[str, ...]
    """Full sentences with the file, the parameter and the box."""
    files: int
    """The number of files that were read."""
    nbytes: int
    """The number of payload bytes that were read."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: good ({self.files} files, {self.nbytes} bytes)"
        # Without a manifest no file was opened.
        found = "damaged" if self.files else "not verified"
        return "\n".join([f"{self.path}: {found}", *self.problems])


def verify(
    path: str | os.PathLike[str], *, progress: Progress | None = None
) -> Verification:
    """Verify a native checkpoint completely: manifest, file sizes, every checksum.

    ``path`` is the checkpoint, or a directory of checkpoints, of which the newest is
    verified; a path or a URL.
    ``progress`` is called after each block of 4 MiB; the default None calls nothing.
    Every file is read block by block. No process group is needed. Damage is reported in
    the result, and does not raise.

    Collective: none.

    >>> assert verify("runs/step-100")
    """
    path = whole_path(path)
    problems: list[str] = []
    files, done = 0, 0
    try:
        path = _newest(path)
        # Without the loose tensors: reading them would raise at the first damaged
        # block, before the other blocks are verified.
        if not is_url(path) and not os.path.lexists(os.path.join(path, MANIFEST)):
            text = no_checkpoint_text(path)
            raise CheckpointError(
                f"{text} verify expects a checkpoint that save wrote ({MANIFEST})."
            )
        with NativeSource(path, values=False) as source:
            # For ``progress``: the payload bytes of all files.
            total = sum(file.payload_nbytes for file in source.manifest.files)
            for reader in source.files:
                files += 1
                size = reader.file.payload_nbytes
                # ``max``: an empty payload still has a header to verify.
                for begin in range(0, max(size, 1), BLOCK):
                    # Several checksums may cover these bytes.
                    end = min(begin + BLOCK, size)
                    try:
                        reader.check([ReadRequest(begin, end, None, 0, ())])
                    except CheckpointError as error:
                        problems.append(_text(error))
                        # The file itself is missing, short, or has a damaged header, so
                        # each further block would report the same problem.
                        if not reader.is_open:
                            break
                    done += end - begin
                    if progress is not None:
                        progress(done, total)
    except CheckpointError as error:
        problems.append(_text(error))
    except OSError as error:
        if not is_url(path):
            raise
        problems.append(f"{path} cannot be read: {error}.")
    return Verification(path, tuple(problems), files, done)


def _newest(path: str) -> str:
    """Return the checkpoint at ``path``, or the newest in ``path``, or ``path``."""
    if is_url(path):
        return find_checkpoint(path)[0]
    if os.path.lexists(os.path.join(path, MANIFEST)):
        return path
    newest = newest_in(path)
    return path if newest is None else newest.path


def _text(error: CheckpointError) -> str:
    """Return the text of the error."""
    return str(error.args[0])
