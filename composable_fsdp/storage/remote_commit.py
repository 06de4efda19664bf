"""Commits, lists and removes checkpoints in a ``Storage``, on the writing rank.

::

    runs/step-100/rank00000-9f3a..77.safetensors    names are new in each attempt
    runs/step-100/rank00001-9f3a..77.safetensors
    runs/step-100/manifest.json                     the marker, written last

A folder without the marker is no checkpoint, and the marker names the files. ``latest``
is not a file there: the newest marker is the newest checkpoint. No function here uses a
collective.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.bounds import require_document
from composable_fsdp.storage.commit import is_of_series, number_of
from composable_fsdp.storage.directory import LATEST, MANIFEST
from composable_fsdp.storage.remote import (
    StoredObject,
    join,
    split,
)
from composable_fsdp.storage.storages import storage_of


class Marked(NamedTuple):
    """A folder in a storage: a checkpoint if there is a marker, else an upload."""

    url: str
    files: dict[str, StoredObject]
    """All objects of the folder, by the name within the folder."""

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each object."""
        return {name: each.nbytes for name, each in self.files.items()}

    @property
    def is_committed(self) -> bool:
        """Whether the marker is there."""
        return MANIFEST in self.files

    @property
    def time(self) -> datetime:
        """The time of the commit."""
        return self.files[MANIFEST].time


def folders_in(url: str) -> list[Marked]:
    """Return the folders below ``url`` that hold files of checkpoints, by name.

    Raises: OSError.
    """
    storage, name = storage_of(url)
    found: defaultdict[str, dict[str, StoredObject]] = defaultdict(dict)
    start = name.strip("/")
    for each in storage.list(name):
        inner = each.name.strip("/")[len(start) :].strip("/")
        folder, _, file = inner.rpartition("/")
        # Only folders directly below: others belong to other runs.
        if folder and "/" not in folder and (file == MANIFEST or is_part(file)):
            found[folder][file] = each
    return [Marked(join(url, name), found[name]) for name in sorted(found)]


def folder_at(url: str) -> Marked:
    """Return the folder ``url`` itself, which may be empty. Raises: OSError."""
    storage, name = storage_of(url)
    start = name.strip("/")
    files = {
        inner: each
        for each in storage.list(name)
        # A deeper folder is another checkpoint.
        if "/" not in (inner := each.name.strip("/")[len(start) :].strip("/"))
    }
    return Marked(url, files)


def is_part(file: str) -> bool:
    """Return whether ``file`` is the name of a rank's file, or of half a marker."""
    # ``FsspecStorage.put`` writes a marker under another name where files grow.
    if file.startswith(f"{MANIFEST}.") and file.endswith(".part"):
        return True
    return file.startswith("rank") and file.endswith(".safetensors")


def begin_remote(url: str, overwrite: bool, ranks: int) -> str:
    """Return the token of a new attempt to save at ``url``.

    Raises: CheckpointError, if the save cannot be committed at ``url``.
    """
    if split(url)[1] in ("", LATEST):
        raise CheckpointError(f"{url} has no name of a checkpoint, such as step-100.")
    # Every process has a memory of its own, so the marker would name files that
    # no other process sees.
    if url.startswith("memory://") and ranks > 1:
        raise CheckpointError(
            f"{url} lies in the memory of a single process, and {ranks} ranks save. "
            "Save to a file system or an object store that all ranks reach."
        )
    found = folder_at(url)
    if found.is_committed and not overwrite:
        raise exists(url)
    # A folder of the user is never mixed with files of a checkpoint.
    others = sorted(n for n in found.files if n != MANIFEST and not is_part(n))
    if others:
        raise CheckpointError(
            f"{url} holds {others[0]!r}, which is no file of a checkpoint. Choose "
            "another name, or remove it first."
        )
    # A token per attempt: a writer of an interrupted attempt that is still alive
    # cannot change the files of this attempt.
    return secrets.token_hex(8)


def exists(url: str) -> CheckpointError:
    """Return the error for a checkpoint that would be overwritten."""
    return CheckpointError(
        f"{url} exists already, and nothing is overwritten. Choose another name, or "
        "remove it first, or pass save(..., overwrite=True)."
    )


def commit_remote(
    url: str, marker: bytes, overwrite: bool, files: Mapping[str, int]
) -> None:
    """Write the marker, which makes the files at ``url`` a checkpoint.

    Raises: CheckpointError, if another save has committed there meanwhile, or a file
    is not there; OSError.
    """
    _require_files(url, files)
    storage, name = storage_of(join(url, MANIFEST))
    try:
        # A replaced marker is a single request, so that readers see the old checkpoint
        # or the new one, whose files lie beside each other until then.
        storage.put(name, marker, absent=not overwrite)
    except FileExistsError as error:
        # The answer to a marker may be lost, and the client then writes again.
        if _same_content(url, marker):
            return
        raise exists(url) from error
    except OSError:
        if not _same_content(url, marker):
            raise


def _require_files(url: str, files: Mapping[str, int]) -> None:
    """Raise CheckpointError if a file that the marker will name is not there."""
    # Another save to the same URL that has committed meanwhile removed all files that
    # its own marker does not name. With ``overwrite``, a marker of files that are gone
    # would replace that whole checkpoint.
    there = folder_at(url).files
    for name, nbytes in sorted(files.items()):
        if name not in there or there[name].nbytes != nbytes:
            found = f"{there[name].nbytes} bytes" if name in there else "nothing"
            raise CheckpointError(
                f"{join(url, name)} was uploaded with {nbytes} bytes, and the storage "
                f"shows {found}; nothing was committed. Another save to {url} may have "
                "removed the file: save from a single job, or choose another name."
            )


def _same_content(url: str, marker: bytes) -> bool:
    """Return whether the marker at ``url`` is ``marker``."""
    storage, name = storage_of(join(url, MANIFEST))
    try:
        # A byte more than the marker has: a longer object differs, too.
        return storage.read(name, 0, len(marker) + 1) == marker
    except OSError:
        return False


def discard_remote(url: str, token: str) -> None:
    """Remove the files of an attempt that was not committed; errors are ignored.

    Nothing is removed if the marker names the files, or cannot be read.
    """
    with suppress(OSError, CheckpointError):
        storage, _ = storage_of(url)
        files = folder_at(url).files
        # The answer to the marker may have been lost, or Ctrl-C have come after it: the
        # files are then those of a checkpoint.
        if MANIFEST in files and token.encode() in read_marker(url):
            return
        for name, each in files.items():
            # Files of other attempts have other tokens, and may belong to the marker.
            if token in name:
                storage.delete(each.name)


def read_marker(url: str, folder: Marked | None = None) -> bytes:
    """Return the content of the marker at ``url``.

    ``folder`` is the result of ``folder_at``; None: listed here.

    Raises: CheckpointError, if there is none, or its size is no marker's.
    """
    file = join(url, MANIFEST)
    found = (folder or folder_at(url)).files.get(MANIFEST)
    if found is None:
        raise CheckpointError(
            f"{url} has no {MANIFEST}, which a save writes last; expected a checkpoint "
            "that was committed."
        )
    require_document(file, found.nbytes)
    storage, name = storage_of(file)
    return storage.read(name, 0, found.nbytes)


def newest_remote(url: str) -> Marked | None:
    """Return the checkpoint below ``url`` that was committed last, or None.

    Among markers of the same second, the larger number is the newer checkpoint.
    """
    # A folder without a marker may be an upload that is still running.
    marked = [each for each in folders_in(url) if each.is_committed]
    # Object stores tell times in seconds.
    return max(
        marked,
        key=lambda each: (
            each.time.replace(microsecond=0),
            number_of(split(each.url)[1]) or -1,
        ),
        default=None,
    )


def remove_older_remote(url: str, keep: int | None, files: set[str]) -> list[str]:
    """Remove files at ``url`` that its marker does not name, and older checkpoints."""
    problems: list[str] = []
    parent, name = split(url)
    mine = number_of(name)
    try:
        # Left by a checkpoint that was replaced, or by an attempt that was interrupted.
        _delete(folder_at(url), problems, spare={MANIFEST, *files})
        if keep is None or mine is None:
            return problems
        older = [
            (number, each)
            for each in folders_in(parent)
            if each.is_committed
            and is_of_series(name, other := split(each.url)[1])
            and other != name
            and (number := number_of(other)) is not None
            and number <= mine
        ]
        older.sort(key=lambda pair: pair[0])
        for _, each in older[: max(0, len(older) - keep + 1)]:
            _delete(each, problems)
    except OSError as error:
        problems.append(f"{parent} ({error})")
    return problems


def _delete(found: Marked, problems: list[str], spare: set[str] | None = None) -> None:
    """Delete the files of a folder but ``spare``; errors go to ``problems``."""
    storage, _ = storage_of(found.url)
    # The marker first: a folder that is removed in part must be no checkpoint.
    order = sorted(found.files, key=lambda file: file != MANIFEST)
    try:
        for file in order:
            # A user may have put a file beside those of the checkpoint.
            is_ours = file == MANIFEST or is_part(file)
            if is_ours and file not in (spare or ()):
                storage.delete(found.files[file].name)
    except OSError as error:
        problems.append(f"{found.url} ({error.strerror or error})")


def stale_remote(url: str) -> list[str]:
    """Return the folders below ``url`` with files of saves that were not committed."""
    return [each.url for each in folders_in(url) if not each.is_committed]


def remove_stale_remote(url: str) -> list[str]:
    """Remove the folders that ``stale_remote`` returns, and return them.

    Raises: OSError, if a folder cannot be removed.
    """
    found = [each for each in folders_in(url) if not each.is_committed]
    for each in found:
        problems: list[str] = []
        _delete(each, problems)
        if problems:
            raise OSError(f"{problems[0]} could not be removed.")
    return [each.url for each in found]
