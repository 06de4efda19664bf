"""Paths that a checkpoint may name, and paths that it is written to.

A checkpoint comes from somebody else: a file name in it is data, and opens nothing
outside its directory. What is written here appears at once and whole, or not at all.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import commit, make_temporary, sync


def inner_file(directory: Path, name: object) -> Path:
    """The path of the regular file ``name`` that lies in ``directory`` itself.

    Raises: CheckpointError, for a name with a folder in it, a link that leads out of
    the directory, or a file that is missing or not a regular one.
    """
    plain = isinstance(name, str) and name not in ("", "..") and "\0" not in name
    if not isinstance(name, str) or not plain or PurePosixPath(name).name != name:
        raise CheckpointError(
            f"{directory} names the file {name!r}; expected the plain name of a file "
            "in that directory. The checkpoint is damaged or hostile: nothing of it "
            "was read."
        )
    path = directory / name
    try:
        mode = path.lstat().st_mode
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{directory} names the file {name!r}, which cannot be opened: {error}. "
            "Copy the checkpoint again, with all its files."
        ) from error
    if stat.S_ISLNK(mode) and target.parent not in _link_targets(directory):
        raise CheckpointError(
            f"{path} is a symbolic link that leads out of its directory. Put the file "
            "itself in its place, if you trust it."
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file.")
    return path


def _link_targets(directory: Path) -> set[Path]:
    """Folders that a link may point to: its own, and the blobs of a download cache.

    The cache of Hugging Face's hub keeps ``snapshots/<revision>/<name>`` as links into
    ``blobs`` beside ``snapshots``.
    """
    own = directory.resolve()
    allowed = {own}
    if own.parent.name == "snapshots":
        allowed.add(own.parent.parent / "blobs")
    return allowed


@contextmanager
def appear(path: Path) -> Iterator[Path]:
    """Give a fresh directory to work in; its ``out`` becomes ``path`` when all is done.

    ``out`` is a file or a directory that the block makes. It is synced to the disk and
    renamed; an error leaves neither ``path`` nor the working directory.

    Raises: CheckpointError, if ``path`` exists, or if it cannot be written.
    """
    work = begin(path)
    try:
        yield work / OUT
        finish(work, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


OUT = "out"
"""Name, in the working directory, of what is being written."""


def begin(path: Path) -> Path:
    """Make the working directory of a checkpoint that is to stand at ``path``.

    Raises: CheckpointError, if ``path`` exists, or if it cannot be written.
    """
    return Path(make_temporary(str(path.absolute())))


def finish(work: Path, path: Path) -> None:
    """Sync what stands in ``work`` and rename it to ``path``."""
    out = work / OUT
    for each in out.rglob("*"):
        sync(each)
    commit(str(out), str(path.absolute()))


def unwritable(path: Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written, after its cleaning up."""
    return CheckpointError(
        f"{path} could not be written: {error}. Nothing was left behind; free space or "
        "choose another destination."
    )
