"""Checks paths that a checkpoint names, and makes new checkpoints appear at once."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import commit, make_temporary, sync


def inner_file(directory: Path, name: object) -> Path:
    """Return the path of the regular file ``name`` in ``directory`` itself.

    Raises: CheckpointError, for a name with a folder, a symbolic link out of the
    directory, or a file that is missing or not regular.
    """
    # A checkpoint may come from an unknown author: a file name in a checkpoint is data,
    # and must not open a file outside of the directory.
    plain = isinstance(name, str) and name not in ("", "..") and "\0" not in name
    if not isinstance(name, str) or not plain or PurePosixPath(name).name != name:
        raise CheckpointError(
            f"{directory} names the file {name!r}; expected the plain name of a file "
            "in that directory. The checkpoint is damaged or hostile: nothing of it "
            "was read."
        )
    path = directory / name
    try:
        # ``lstat`` does not follow a link.
        mode = path.lstat().st_mode
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{directory} names the file {name!r}, which cannot be opened: {error}. "
            "Copy the checkpoint again, with all its files."
        ) from error
    # A link out of the directory could make a load read any file of the machine.
    if stat.S_ISLNK(mode) and target.parent not in _link_targets(directory):
        raise CheckpointError(
            f"{path} is a symbolic link that leads out of its directory. Put the file "
            "itself in its place, if you trust it."
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file.")
    return path


def _link_targets(directory: Path) -> set[Path]:
    """Return the folders that a symbolic link in ``directory`` may point into."""
    own = directory.resolve()
    allowed = {own}
    # The cache of Hugging Face's hub keeps ``snapshots/<revision>/<name>`` as links
    # into ``blobs`` beside ``snapshots``.
    if own.parent.name == "snapshots":
        allowed.add(own.parent.parent / "blobs")
    return allowed


@contextmanager
def appear(path: Path) -> Iterator[Path]:
    """Yield a new working directory; rename ``out`` in it to ``path`` at the end.

    ``out`` is a file or a directory that the block makes. ``out`` is synced to the disk
    and then renamed. After an error, neither ``path`` nor the working directory exists.

    Raises: CheckpointError, if ``path`` exists or cannot be written.
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
"""The name of the new file or directory in the working directory."""


def begin(path: Path) -> Path:
    """Make the working directory for a checkpoint at ``path``.

    Raises: CheckpointError, if ``path`` exists or cannot be written.
    """
    return Path(make_temporary(str(path.absolute())))


def finish(work: Path, path: Path) -> None:
    """Sync the output in ``work``, then rename the output to ``path``."""
    out = work / OUT
    # ``commit`` syncs ``out`` itself, but not the files in it.
    for each in out.rglob("*"):
        sync(each)
    commit(str(out), str(path.absolute()))


def unwritable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint that failed to be written and was removed."""
    return CheckpointError(
        f"{path} could not be written: {error}. Nothing was left behind; free space or "
        "choose another destination."
    )
