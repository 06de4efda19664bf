"""Lists the checkpoints in a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.commit import number_of
from composable_fsdp.storage.directory import MANIFEST, remove_local, stale_local
from composable_fsdp.storage.metric import Metric, best_of
from composable_fsdp.storage.native import read_manifest
from composable_fsdp.storage.remote import is_url, split, whole_path
from composable_fsdp.storage.remote_commit import (
    Marked,
    folder_at,
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
    metric: float | None = None
    """The metric that ``save`` was given, or None."""


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
            nbytes, is_whole, metric = _examined(entry.path)
            value = None if metric is None else metric.value
            step = number_of(entry.name)
            found.append(
                CheckpointInfo(entry.path, step, time, nbytes, is_whole, value)
            )
    return sorted(found, key=_order)


def _order(info: CheckpointInfo) -> tuple[int, datetime]:
    """Return the key to sort by: names without a number come first."""
    return info.step or -1, info.time


def _at_url(marked: Marked) -> CheckpointInfo:
    """Return a checkpoint in a storage."""
    sizes, step = marked.sizes, number_of(split(marked.url)[1])
    is_whole, metric = _judged(marked.url, sizes, marked)
    value = None if metric is None else metric.value
    nbytes = sum(sizes.values())
    return CheckpointInfo(marked.url, step, marked.time, nbytes, is_whole, value)


def best_checkpoint(directory: str | os.PathLike[str]) -> CheckpointInfo:
    """Return the whole checkpoint in ``directory`` with the best metric.

    Of equal metrics, the newest. A checkpoint without a metric, or with NaN, is never
    the best. ``load(directory, .., which="best")`` loads this checkpoint.

    Raises: CheckpointError, if no checkpoint has a metric, or if some were saved with
    ``best="min"`` and some with ``best="max"``; OSError, as ``checkpoints``.
    Collective: none.

    >>> best_checkpoint("runs").step
    100
    """
    # Sorted by step, so the last of equals is the newest.
    infos = {each.path: each for each in checkpoints(directory) if each.is_whole}
    try:
        found = best_of({path: _metric(path) for path in infos}, 1)
    except ValueError as error:
        raise CheckpointError(
            f"{whole_path(directory)}: {error} (save(.., best=..)). Name the "
            "checkpoint to load, or keep the runs in directories of their own."
        ) from None
    # No fall-back to the newest, which the caller has not asked for.
    if not found:
        raise CheckpointError(
            f"{whole_path(directory)} holds no whole checkpoint with a metric "
            f"({len(infos)} without). Pass save(.., metric=validation_loss), or load "
            "the newest."
        )
    return infos[found[0]]


def _metric(path: str) -> Metric | None:
    """Return the metric of a checkpoint. Raises: CheckpointError."""
    return Metric.saved(read_manifest(path)[0].metric)


_known: dict[str, tuple[object, Metric | None]] = {}
"""Metrics that this process has read, by path, each with ``_identity`` of the file."""


def _known_metric(path: str) -> Metric | None:
    """Return the metric of a checkpoint, read once; see ``_metric``."""
    # Before the file is read: a checkpoint that is replaced in between is read again at
    # the next save.
    identity = _identity(path)
    found = _known.get(path)
    if found is None or found[0] != identity:
        found = _known[path] = identity, _metric(path)
    return found[1]


def _identity(path: str) -> object:
    """Return a value that differs for a manifest that replaced another.

    Raises: OSError.
    """
    if is_url(path):
        # The names of files have a new token in each save.
        files = folder_at(path).files
        return sorted((name, each.nbytes, each.time) for name, each in files.items())
    # A commit makes a new file, so the inode differs within the tick of a clock.
    status = os.stat(os.path.join(path, MANIFEST), follow_symlinks=False)
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size


def spared(paths: Sequence[str], count: int) -> dict[str, str]:
    """Return the checkpoints that must stay as the ``count`` best.

    Args:
        paths: the checkpoints of a series, the newest last.
        count: the number of best checkpoints to keep; with 0, nothing is read.

    Returns: each path with an empty text, or with the reason if nobody knows whether
    the checkpoint is among the best.
    Collective: none.
    """
    # Manifests of large models are megabytes each.
    if not count:
        return {}
    kept: dict[str, str] = {}
    metrics: dict[str, Metric | None] = {}
    for path in paths:
        # Nothing is lost for a disk that is slow to answer, or a damaged manifest.
        try:
            metrics[path] = _known_metric(path)
        except (CheckpointError, OSError) as error:
            kept[path] = f"its metric cannot be read: {error}"
    # Those that were removed meanwhile: a run of weeks has made thousands.
    parents = {os.path.dirname(path) for path in paths}
    for path in [p for p in _known if os.path.dirname(p) in parents]:
        if path not in metrics:
            del _known[path]
    # The newest tells the meaning that the user has in mind now.
    modes = [metric.best for metric in metrics.values() if metric is not None]
    for path, metric in metrics.items():
        if metric is not None and metric.best != modes[-1]:
            kept[path] = f"saved with best={metric.best!r}, and the newest with other"
    comparable = {path: m for path, m in metrics.items() if path not in kept}
    return {**dict.fromkeys(best_of(comparable, count), ""), **kept}


def _examined(path: str) -> tuple[int, bool, Metric | None]:
    """Return the bytes of the files, whether all are as they should, and the metric."""
    sizes = {
        entry.name: entry.stat(follow_symlinks=False).st_size
        for entry in os.scandir(path)
        if entry.is_file(follow_symlinks=False)
    }
    return sum(sizes.values()), *_judged(path, sizes)


def _judged(
    path: str, sizes: dict[str, int], folder: Marked | None = None
) -> tuple[bool, Metric | None]:
    """Return whether manifest and sizes of the files are sound, and the metric.

    Args:
        path: the checkpoint.
        sizes: those of the files that are there, by name.
        folder: the folder at a URL. Default None: a directory.

    Collective: none.
    """
    # The manifest has a checksum of its own; the payload is compared by size, because
    # to read each byte of a series of checkpoints takes minutes.
    try:
        manifest, _ = read_manifest(path, folder)
    except CheckpointError:
        return False, None
    whole = all(
        sizes.get(file.name) == file.header_nbytes + file.payload_nbytes
        for file in manifest.files
    )
    return whole, Metric.saved(manifest.metric)
