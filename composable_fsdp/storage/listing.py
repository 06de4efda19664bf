"""Lists the checkpoints in a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.commit import number_of
from composable_fsdp.storage.directory import MANIFEST
from composable_fsdp.storage.native import read_manifest


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint in a directory, without its values; see ``checkpoints``.

    >>> newest = checkpoints("runs")[-1]
    >>> newest.step, newest.is_whole
    (100, True)
    """

    path: str
    """The absolute path."""
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

    Reads manifests and sizes, and no payload; ``verify`` reads each byte. Checkpoints
    that are being written are not listed. No process group is needed.

    Raises: OSError, if ``directory`` cannot be listed.
    Collective: none.

    >>> [(each.step, each.is_whole) for each in checkpoints("runs")]
    [(100, True)]
    """
    found = []
    for entry in os.scandir(os.path.abspath(directory)):
        # Temporary directories, and checkpoints that are being removed.
        hidden = entry.name.startswith(".")
        if hidden or not entry.is_dir(follow_symlinks=False):
            continue
        manifest = os.path.join(entry.path, MANIFEST)
        if os.path.lexists(manifest):
            time = datetime.fromtimestamp(os.lstat(manifest).st_mtime, timezone.utc)
            nbytes, is_whole = _sizes(entry.path)
            found.append(
                CheckpointInfo(
                    entry.path, number_of(entry.name), time, nbytes, is_whole
                )
            )
    # Names without a number come first.
    return sorted(found, key=lambda each: (each.step or -1, each.time))


def _sizes(path: str) -> tuple[int, bool]:
    """Return the bytes of the files in ``path``, and whether all are as they should."""
    sizes = {
        entry.name: entry.stat(follow_symlinks=False).st_size
        for entry in os.scandir(path)
        if entry.is_file(follow_symlinks=False)
    }
    # The manifest has a checksum of its own; the payload is compared by size, because
    # to read each byte of a series of checkpoints takes minutes.
    try:
        manifest, _ = read_manifest(path)
    except CheckpointError:
        return sum(sizes.values()), False
    whole = all(
        sizes.get(file.name) == file.header_nbytes + file.payload_nbytes
        for file in manifest.files
    )
    return sum(sizes.values()), whole
