"""Lists the checkpoints in a directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.blocks import ReadRequest
from composable_fsdp.storage.commit import (
    Folder,
    folders_in,
    number_of,
    remove_folders,
    stale_folders,
)
from composable_fsdp.storage.directory import (
    MANIFEST,
    stale_outputs,
)
from composable_fsdp.storage.manifest import BLOCK
from composable_fsdp.storage.native import NativeSource, read_manifest
from composable_fsdp.storage.opening import NATIVE, find_checkpoint
from composable_fsdp.storage.storages import is_url, split, whole_path


def remove_stale(
    directory: str | os.PathLike[str], *, dry_run: bool = False
) -> list[str]:
    """Remove the leftovers of interrupted saves in ``directory``; return their paths.

    Leftovers are folders with files of checkpoints and without a manifest, and
    temporary directories of conversions and exports. A running save looks like a
    leftover, so call this only when no save runs. With ``dry_run`` (default False),
    nothing is removed.

    Returns: paths or URLs, sorted.
    """
    place = whole_path(directory)
    folders = stale_folders(place)
    outputs = [] if is_url(place) else stale_outputs(place)
    if not dry_run:
        remove_folders(folders)
        for each in outputs:
            shutil.rmtree(each)
    return sorted([*(each.path for each in folders), *outputs])


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint in a directory, without its values; see ``checkpoints``.

    >>> newest = checkpoints("runs")[-1]
    >>> newest.step, newest.is_whole
    (100, True)
    """

    path: str
    """The absolute path, or the URL."""
    step: int | None
    """The last number in the name, or None."""
    time: datetime
    """The time at which the manifest was written, in UTC."""
    nbytes: int
    """The bytes of all files that are there, manifest included."""
    is_whole: bool
    """Whether the manifest is sound and each file has the size that it says."""


def checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the native checkpoints in ``directory``, by step and then by time.

    ``directory`` may be a URL.

    Reads manifests and sizes, and no payload; ``verify`` reads each byte. Checkpoints
    that are being written are not listed, and a directory that is not there has none.
    No process group is needed.

    Raises: OSError, if ``directory`` cannot be listed.

    >>> [(each.step, each.is_whole) for each in checkpoints("runs")]
    [(100, True)]
    """
    folders = folders_in(whole_path(directory))
    return sorted(
        map(_info, (each for each in folders if each.is_committed)), key=_order
    )


def _order(info: CheckpointInfo) -> tuple[int, datetime]:
    """Return the key to sort by: names without a number come first."""
    return info.step or -1, info.time


def _info(folder: Folder) -> CheckpointInfo:
    """Return the facts of a checkpoint."""
    step, sizes = number_of(split(folder.path)[1]), folder.sizes
    nbytes = sum(max(size, 0) for size in sizes.values())
    whole = _is_whole(folder)
    return CheckpointInfo(folder.path, step, folder.time, nbytes, whole)


def _is_whole(folder: Folder) -> bool:
    """Return whether the manifest is sound, and the files have the sizes in it."""
    # The manifest has a checksum of its own; the payload is compared by size, because
    # to read each byte of a series of checkpoints takes minutes.
    try:
        manifest, _ = read_manifest(folder.path, folder)
    except CheckpointError:
        return False
    return all(
        folder.sizes.get(file.name) == file.header_nbytes + file.payload_nbytes
        for file in manifest.files
    )


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

    >>> assert verify("runs/step-100")
    """
    path = whole_path(path)
    problems: list[str] = []
    files, done = 0, 0
    try:
        path, kind = find_checkpoint(path)
        # Without the loose tensors: reading them would raise at the first damaged
        # block, before the other blocks are verified.
        if kind != NATIVE:
            raise CheckpointError(
                f"{path} is of the format {kind}; verify expects a checkpoint that "
                f"save wrote ({MANIFEST})."
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


def _text(error: CheckpointError) -> str:
    """Return the text of the error."""
    return str(error.args[0])
