"""Lists the checkpoints in a directory."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.commit import (
    Folder,
    folders_in,
    number_of,
    remove_folders,
    stale_folders,
)
from composable_fsdp.storage.directory import stale_outputs
from composable_fsdp.storage.native import read_manifest
from composable_fsdp.storage.remote import is_url, split, whole_path


def stale_directories(directory: str | os.PathLike[str]) -> list[Any]:
    """Return the leftovers of interrupted saves in ``directory``, sorted by name.

    Leftovers are folders with files of checkpoints and without a manifest, and
    temporary directories of conversions and exports. A running save looks like a
    leftover, so call this only when no save runs.

    Returns: paths; for a URL, URLs as texts.
    """
    place = whole_path(directory)
    found = [each.path for each in stale_folders(place)]
    if is_url(place):
        return found
    return sorted([*map(Path, found), *stale_outputs(place)])


def remove_stale(directory: str | os.PathLike[str]) -> list[Any]:
    """Remove the paths that ``stale_directories`` returns, and return them."""
    place, found = whole_path(directory), stale_directories(directory)
    remove_folders(stale_folders(place))
    for each in () if is_url(place) else stale_outputs(place):
        shutil.rmtree(each)
    return found


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
    Collective: none.

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
