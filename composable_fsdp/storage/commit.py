"""Commits, lists and removes checkpoints: rank 0 writes the manifest last, at once.

A folder without a manifest is no checkpoint. Where the folder was there before, names
of files have a token, so that attempts never share a file.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import cached_property

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import (
    MANIFEST,
    make_parents,
    open_plain,
    put_file,
    read_document,
    require_document,
)
from composable_fsdp.storage.storages import (
    StoredObject,
    is_url,
    join,
    split,
    storage_of,
)

_NUMBER = re.compile(r"(?P<before>.*?)(?P<number>\d+)(?P<after>\D*)\Z", re.DOTALL)
_HEAD = re.compile(rb'\{"crc32": "[0-9a-f]{8}", "time": "(\d{19})"')
PLAIN = ".safetensors"
"""The end of the names of files in a folder that the save has made."""


class Folder:
    """The place of a checkpoint: committed if there is a manifest, else an upload."""

    def __init__(
        self, path: str, files: Mapping[str, StoredObject] | None = None
    ) -> None:
        self.path, self._files = path, files

    @cached_property
    def files(self) -> Mapping[str, StoredObject]:
        """All objects of the folder, by the name within it. Raises: OSError."""
        if self._files is not None:
            return self._files
        if is_url(self.path):
            return {n: each for n, each in _below(self.path) if "/" not in n}
        with suppress(FileNotFoundError):
            return {each.name: _entry(each) for each in os.scandir(self.path)}
        return {}

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each object."""
        return {name: each.nbytes for name, each in self.files.items()}

    @property
    def is_committed(self) -> bool:
        """Whether the manifest is there."""
        if is_url(self.path):
            return MANIFEST in self.files
        # Without a list: a directory of checkpoints of 1,024 ranks has many files.
        return os.path.lexists(os.path.join(self.path, MANIFEST))

    @property
    def time(self) -> datetime:
        """The time at which the manifest was written."""
        return self.files[MANIFEST].time

    @property
    def written(self) -> int:
        """When the file system says that the manifest was written, in ns; or 0."""
        with suppress(OSError):
            return os.lstat(os.path.join(self.path, MANIFEST)).st_mtime_ns
        return 0

    @property
    def age(self) -> tuple[int, int]:
        """A value that is larger for a checkpoint that was committed later."""
        number = number_of(split(self.path)[1]) or -1
        # A request per manifest would cost more; object stores tell times in seconds.
        if is_url(self.path):
            return int(self.time.timestamp()), number
        # In the file, because a copy of a directory may have other times.
        with suppress(OSError, CheckpointError):
            handle = open_plain(os.path.join(self.path, MANIFEST))
            with open(handle, "rb") as file:
                if found := _HEAD.match(file.read(100)):
                    return int(found[1]), number
        # Damaged: a load of the directory must say so, and take no older one.
        return self.written, number


def _entry(entry: os.DirEntry[str]) -> StoredObject:
    """Return an entry of a directory; a link or a directory has no bytes."""
    status = entry.stat(follow_symlinks=False)
    time = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    is_file = entry.is_file(follow_symlinks=False)
    return StoredObject(entry.path, status.st_size if is_file else -1, time)


def _below(url: str) -> Iterator[tuple[str, StoredObject]]:
    """Yield all objects below a URL, by the name from there."""
    storage, name = storage_of(url)
    start = len(name.strip("/"))
    for each in storage.list(name):
        yield each.name.strip("/")[start:].strip("/"), each


def folders_in(path: str) -> Iterator[Folder]:
    """Yield the folders in ``path`` that may hold a checkpoint; none without it."""
    if not is_url(path):
        entries: list[os.DirEntry[str]] = []
        with suppress(FileNotFoundError):
            entries = sorted(os.scandir(path), key=lambda each: each.name)
        for entry in entries:
            # Never the target of a link, and no temporary directory.
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield Folder(entry.path)
        return
    found: defaultdict[str, dict[str, StoredObject]] = defaultdict(dict)
    for inner, each in _below(path):
        folder, _, file = inner.rpartition("/")
        if folder and "/" not in folder and (file == MANIFEST or is_part(file)):
            found[folder][file] = each
    for name in sorted(found):
        yield Folder(join(path, name), found[name])


def newest_in(path: str) -> Folder | None:
    """Return the checkpoint in ``path`` that was committed last, or None."""
    if not is_url(path) and not os.path.isdir(path):
        return None
    # A folder without a manifest may be an upload that is still running.
    marked = [each for each in folders_in(path) if each.is_committed]
    return max(marked, key=lambda each: each.age, default=None)


def last_time(path: str) -> int:
    """Return the time in the manifest in ``path`` that was written last, or 0."""
    times = {each: each.written for each in folders_in(path)}
    last = max(times.values(), default=0)
    # A save opens a single one, however many checkpoints there are; or all after a
    # clock was set back, when times of files are out of order, too.
    every = last >= time.time_ns()
    asked = [each for each, at in times.items() if at and (every or at == last)]
    return max((each.age[0] for each in asked), default=0)


def is_part(file: str) -> bool:
    """Return whether ``file`` is the name of a rank's file, or of half a manifest."""
    if file.startswith(f"{MANIFEST}.") and file.endswith(".part"):
        return True
    return file.startswith("rank") and file.endswith(".safetensors")


def begin(path: str, overwrite: bool, ranks: int) -> str:
    """Return the end of the names of the files of a new attempt to save at ``path``."""
    if not split(path)[1]:
        raise CheckpointError(f"{path} has no name of a checkpoint, such as step-100.")
    if path.startswith("memory://") and ranks > 1:
        raise CheckpointError(
            f"{path} lies in the memory of a single process, and {ranks} ranks save. "
            "Save to a file system or an object store that all ranks reach."
        )
    if not is_url(path) and _is_made(path):
        return PLAIN
    folder = Folder(path)
    if folder.is_committed and not overwrite:
        raise _exists(path)
    # A folder of the user is never mixed with files of a checkpoint.
    others = sorted(n for n in folder.files if n != MANIFEST and not is_part(n))
    if others:
        raise CheckpointError(
            f"{path} holds {others[0]!r}, which is no file of a checkpoint. Choose "
            "another name, or remove it first."
        )
    # No other attempt has these names, and what is replaced stays until the commit.
    return f"-{secrets.token_hex(8)}{PLAIN}"


def _is_made(path: str) -> bool:
    """Make the directory ``path``; return False if it is there."""
    # A link is kept: its target may lie on another file system, or be of another run.
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
        raise CheckpointError(
            f"{path} exists already and is no directory. Choose another name, or "
            "remove it first."
        )
    parent = os.path.dirname(path)
    try:
        make_parents(parent)
        with suppress(FileExistsError):
            os.mkdir(path)
            return True
    except OSError as error:
        raise CheckpointError(
            f"The directory {path} cannot be made ({error.strerror}: "
            f"{error.filename}). Save where this process may write."
        ) from error
    return False


def _exists(path: str) -> CheckpointError:
    """Return the error for a checkpoint that would be overwritten."""
    return CheckpointError(
        f"{path} exists already, and nothing is overwritten. Choose another name, or "
        "remove it first, or pass SaveOptions(overwrite=True)."
    )


def commit(path: str, marker: bytes, overwrite: bool, files: Mapping[str, int]) -> None:
    """Write the manifest ``marker``, which names ``files`` (with sizes in bytes)."""
    # Another save that has committed here meanwhile has removed the files of this one.
    there = Folder(path).sizes
    for name, nbytes in sorted(files.items()):
        if there.get(name) != nbytes:
            told = f"{there[name]} bytes" if name in there else "nothing"
            raise CheckpointError(
                f"{join(path, name)} was written with {nbytes} bytes, and {told} is "
                f"there; nothing was committed. Another save to {path} may have "
                "removed the file: save from a single job, or choose another name."
            )
    file = join(path, MANIFEST)
    try:
        # Replaced at once: readers see the old checkpoint or the new one.
        if is_url(path):
            storage, name = storage_of(file)
            storage.put(name, marker, absent=not overwrite)
        else:
            put_file(file, marker, absent=not overwrite)
    except OSError as error:
        with suppress(OSError, CheckpointError):
            if read_marker(path) == marker:
                return
        if isinstance(error, FileExistsError):
            raise _exists(path) from error
        raise


def discard(path: str, ending: str) -> None:
    """Remove the files of an attempt that was not committed; errors are ignored."""
    name = re.compile(rf"rank\d{{5}}{re.escape(ending)}\Z")
    with suppress(OSError, CheckpointError):
        files = Folder(path).files
        mine = [each for each in files if name.match(each)]
        # The answer may have been lost, or Ctrl-C have come after it: all is committed.
        marker = read_marker(path) if MANIFEST in files else b""
        if any(f'"{each}"'.encode() in marker for each in mine):
            return
        parts = [each for each in files if each.startswith(f"{MANIFEST}.")]
        for each in [*mine, *(parts if ending == PLAIN else ())]:
            _remove(path, files[each])
        if not is_url(path):
            os.rmdir(path)


def _remove(path: str, each: StoredObject) -> None:
    """Remove an object of the folder ``path``. Raises: OSError."""
    if is_url(path):
        storage_of(path)[0].delete(each.name)
    else:
        with suppress(FileNotFoundError):
            os.unlink(each.name)


def read_marker(path: str, folder: Folder | None = None) -> bytes:
    """Return the content of the manifest at ``path``; ``folder`` is its place."""
    file = join(path, MANIFEST)
    if not is_url(path):
        return read_document(file)
    found = (folder or Folder(path)).files.get(MANIFEST)
    if found is None:
        raise CheckpointError(
            f"{path} has no {MANIFEST}, which a save writes last; expected a "
            "checkpoint that was committed."
        )
    require_document(file, found.nbytes)
    storage, name = storage_of(file)
    return storage.read(name, 0, found.nbytes)


def number_of(name: str) -> int | None:
    """Return the last number in ``name``, or None."""
    match = _NUMBER.match(name)
    return int(match["number"]) if match else None


def remove_older(path: str, keep: int | None, files: set[str]) -> list[str]:
    """Remove older checkpoints, and files at ``path`` that the manifest lacks."""
    parent, name = split(path)
    mine = number_of(name)
    problems = remove(Folder(path), spare={MANIFEST, *files})
    if keep is None or mine is None:
        return problems
    try:
        # Never one with a larger number: the run may have gone back to an older one.
        series = _NUMBER.sub(r"\g<before>0\g<after>", name)
        older = [
            (number, each)
            for each in folders_in(parent)
            if (other := split(each.path)[1]) != name
            and _NUMBER.sub(r"\g<before>0\g<after>", other) == series
            and (number := number_of(other)) is not None
            and number <= mine
            and each.is_committed
        ]
    except OSError as error:
        return [*problems, f"{parent} ({error.strerror or error})"]
    older.sort(key=lambda pair: pair[0])
    for _, each in older[: max(0, len(older) - keep + 1)]:
        problems += remove(each)
    return problems


def remove(folder: Folder, spare: set[str] | None = None) -> list[str]:
    """Remove the files of a folder but ``spare``; return what could not be removed."""
    try:
        # The manifest first: a folder that is removed in part must be no checkpoint.
        for file in sorted(folder.files, key=lambda file: file != MANIFEST):
            is_ours = file == MANIFEST or is_part(file)
            if is_ours and file not in (spare or ()):
                _remove(folder.path, folder.files[file])
        if spare is None and not is_url(folder.path):
            os.rmdir(folder.path)
    except OSError as error:
        return [f"{folder.path} ({error.strerror or error})"]
    return []
