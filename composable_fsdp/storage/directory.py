"""Directories of checkpoints: made aside, committed by one rename, found, removed.

::

    runs/
      step-100/  step-200/         whole checkpoints
      .step-300.tmp-9f3a.../       being written, or left by a process that died
      latest                       text: step-200

It happens on the rank that writes; nothing here sends anything.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from composable_fsdp.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-[0-9a-f]{16}\Z")


def path_text(path: object, what: str) -> str:
    """``path`` as text. Raises: TypeError in the name of ``what``, if it is no path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text.strip():
        raise TypeError(f"{what} expects a path, got {path!r}.")
    return text


def make_temporary(path: str) -> str:
    """Make the directory in which the checkpoint ``path`` is written; its path.

    Raises: CheckpointError, if something is at ``path`` or the directory cannot be
    made.
    """
    require_free(path)
    parent, name = os.path.split(path)
    if name == LATEST:
        raise CheckpointError(
            f"{path}: the name {LATEST!r} is kept for the text file that names the "
            "newest checkpoint beside it. Save under another name; load of the "
            "directory above finds it."
        )
    made = os.path.join(parent, f".{name}.tmp-{secrets.token_hex(8)}")
    try:
        _make_parents(parent)
        os.mkdir(made)
    except OSError as error:
        raise CheckpointError(
            f"The directory {made} cannot be made ({error.strerror}: "
            f"{error.filename}); a checkpoint is written there first. Save where "
            "this process may write."
        ) from error
    return made


def _make_parents(path: str) -> None:
    """Make a directory and those above it; their names are on the disk afterwards."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    if missing:
        os.makedirs(missing[0], exist_ok=True)
        for each in missing:
            sync(os.path.dirname(each))


def require_free(path: str) -> None:
    """Raise CheckpointError if there is anything at ``path``."""
    if os.path.lexists(path):
        raise CheckpointError(
            f"{path} exists already, and nothing is overwritten. Choose another name, "
            "or remove it first; save(..., keep=N) removes older checkpoints."
        )


def commit(made: str, path: str) -> None:
    """Give a whole file or directory its name, in one step, and have that on the disk.

    What a directory holds must be there already. ``path`` is absolute.

    Raises: CheckpointError, if something is at ``path``.
    """
    require_free(path)
    sync(made)
    os.rename(made, path)
    sync(os.path.dirname(path))


def write_synced(path: str, data: bytes) -> None:
    """Write a new file that is on the disk when this returns."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o666), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync(path: str | os.PathLike[str]) -> None:
    """Have a file, or the names in a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_latest(path: str) -> None:
    """Make ``latest`` beside ``path`` name it; readers see the old or the new name."""
    parent, name = os.path.split(path)
    made = os.path.join(parent, f".{LATEST}.tmp-{secrets.token_hex(8)}")
    write_synced(made, f"{name}\n".encode())
    os.replace(made, os.path.join(parent, LATEST))
    sync(parent)


def follow_latest(path: str) -> str:
    """The checkpoint that ``latest`` in the directory ``path`` names.

    Raises: CheckpointError, if it names nothing inside the directory.
    """
    file = os.path.join(path, LATEST)
    try:
        with open(file, "rb") as found:
            name = found.read(4096).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); expected the name of a checkpoint "
            "beside it. Pass the checkpoint's own path."
        ) from error
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise CheckpointError(
            f"{file} names {name[:80]!r}, which is no name of a directory beside it. "
            "Pass the checkpoint's own path."
        )
    return os.path.join(path, name)


def remove_older(path: str, keep: int) -> list[str]:
    """Remove all but the newest ``keep`` checkpoints of the series of ``path``.

    The series are the checkpoints beside it whose names differ from its in digits only:
    ``step-100`` and ``step-2000``, but not ``best``. Returns what was removed.
    """
    parent, name = os.path.split(path)
    series = re.compile(
        r"\d+".join(re.escape(part) for part in re.split(r"\d+", name)) + r"\Z"
    )
    ages = []
    for entry in os.scandir(parent):
        manifest = os.path.join(entry.path, MANIFEST)
        if (
            entry.name != name
            and series.match(entry.name)
            and entry.is_dir(follow_symlinks=False)
            and os.path.lexists(manifest)
        ):
            ages.append((os.stat(manifest).st_mtime_ns, entry.path))
    gone = [each for _, each in sorted(ages, reverse=True)[keep - 1 :]]
    for each in gone:
        # Renamed first: what is removed half is not taken for a checkpoint.
        base = os.path.basename(each)
        aside = os.path.join(parent, f".{base}.tmp-{secrets.token_hex(8)}")
        os.rename(each, aside)
        shutil.rmtree(aside)
    return gone


def stale_directories(directory: str | os.PathLike[str]) -> list[Path]:
    """What interrupted saves left in ``directory``, by name: directories, and files
    that were to become ``latest``.

    One of a save that is still running looks the same: ask when none is.
    """
    found = []
    for entry in os.scandir(directory):
        match = _TEMPORARY.match(entry.name)
        is_directory = entry.is_dir(follow_symlinks=False)
        if match and (is_directory or match["name"] == LATEST):
            found.append(Path(entry.path))
    return sorted(found)


def remove_stale(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove what ``stale_directories`` finds, and return it."""
    found = stale_directories(directory)
    for each in found:
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    return found


def stale_copies(path: str) -> list[str]:
    """What interrupted saves of this very checkpoint left beside it."""
    parent, name = os.path.split(path)
    try:
        found = stale_directories(parent)
    except OSError:
        return []
    return [
        str(each)
        for each in found
        if (match := _TEMPORARY.match(each.name)) and match["name"] == name
    ]


def open_plain(path: str) -> int:
    """Open a regular file for reading; no link is followed, no pipe waited for.

    Raises: CheckpointError, naming it, if it is missing or is something else.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error.strerror}); expected a regular file of a "
            "checkpoint. Use another checkpoint."
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(
            f"{path} is no regular file; expected one of a checkpoint. Use another "
            "checkpoint."
        )
    return handle
