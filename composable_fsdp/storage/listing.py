"""Lists the checkpoints in a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.commit import number_of
from composable_fsdp.storage.directory import MANIFEST, remove_local, stale_local
from composable_fsdp.storage.native import read_manifest
from composable_fsdp.storage.remote import is_url, split, whole_path
from composable_fsdp.storage.remote_commit import (
    Marked,
    folders_in,
    remove_stale_remote,
    stale_remote,
)


def stale_directories(directory: str | os.PathLike[str]) -> list[Any]:
    """Return the leftovers of interrupted saves in ``directory``, sorted by name.

    Leftovers are temporary directories, replaced checkpoints that were to be removed,
    and temporary files that were to become ``latest``; at a URL, folders with files of
    checkpoints and without a manifest. A directory whose commit was interrupted is no
    leftover: the next save finishes the commit. The files of a running save look like a
    leftover, so call this only when no save runs.

    Returns: paths; for a URL, URLs as texts.
    """
    place = whole_path(directory)
    return stale_remote(place) if is_url(place) else stale_local(place)


def remove_stale(directory: str | os.PathLike[str]) -> list[Any]:
    """Remove the paths that ``stale_directories`` returns, and return them."""
    place = whole_path(directory)
    return remove_stale_remote(place) if is_url(place) else remove_local(place)


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
    that are being written are not listed. No process group is needed.

    Raises: OSError, if ``directory`` cannot be listed.
    Collective: none.

    >>> [(each.step, each.is_whole) for each in checkpoints("runs")]
    [(100, True)]
    """
    found = []
    place = whole_path(directory)
    if is_url(place):
        found = [_at_url(each) for each in folders_in(place) if each.is_committed]
        return sorted(found, key=_order)
    for entry in os.scandir(place):
        # Temporary directories, and checkpoints that are being removed.
        hidden = entry.name.startswith(".")
        if hidden or not entry.is_dir(follow_symlinks=False):
            continue
        manifest = os.path.join(entry.path, MANIFEST)
        if os.path.lexists(manifest):
            time = datetime.fromtimestamp(os.lstat(manifest).st_mtime, timezone.utc)
            sizes = {
                each.name: each.stat(follow_symlinks=False).st_size
                for each in os.scandir(entry.path)
                if each.is_file(follow_symlinks=False)
            }
            whole = _is_whole(entry.path, sizes)
            step, nbytes = number_of(entry.name), sum(sizes.values())
            found.append(CheckpointInfo(entry.path, step, time, nbytes, whole))
    return sorted(found, key=_order)


def _order(info: CheckpointInfo) -> tuple[int, datetime]:
    """Return the key to sort by: names without a number come first."""
    return info.step or -1, info.time


def _at_url(marked: Marked) -> CheckpointInfo:
    """Return a checkpoint in a storage."""
    sizes, step = marked.sizes, number_of(split(marked.url)[1])
    whole, nbytes = _is_whole(marked.url, sizes, marked), sum(sizes.values())
    return CheckpointInfo(marked.url, step, marked.time, nbytes, whole)


def _is_whole(path: str, sizes: dict[str, int], folder: Marked | None = None) -> bool:
    """Return whether the manifest is sound, and the files have the sizes in it."""
    # The manifest has a checksum of its own; the payload is compared by size, because
    # to read each byte of a series of checkpoints takes minutes.
    try:
        manifest, _ = read_manifest(path, folder)
    except CheckpointError:
        return False
    return all(
        sizes.get(file.name) == file.header_nbytes + file.payload_nbytes
        for file in manifest.files
    )
