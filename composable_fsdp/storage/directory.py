"""Makes, syncs and finds files and directories of checkpoints, on the writing rank."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed


@contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add ``path`` to each OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        # Calls on a file descriptor (write, fsync, preadv) know no name.
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


MAX_DOCUMENT = 1 << 30
"""The most bytes read whole; 70 billion parameters on 1,024 ranks have 7 MB."""


def require_document(path: str, nbytes: int) -> None:
    """Raise CheckpointError if a document of ``nbytes`` is too large to be read."""
    # A sparse file of a terabyte takes no space on a disk, and all of the memory.
    if nbytes > MAX_DOCUMENT:
        raise CheckpointError(
            f"{path} has {nbytes} bytes; expected a description of a checkpoint, of "
            f"at most {MAX_DOCUMENT}. The file is damaged or hostile, and was not "
            "read; use another checkpoint."
        )


def read_document(path: str) -> bytes:
    """Return the content of a small regular file, whose size is judged first."""
    handle = open_plain(path)
    with named_errors(path), open(handle, "rb") as found:
        nbytes = os.fstat(handle).st_size
        require_document(path, nbytes)
        # Another process may append to the file after the judgement.
        return found.read(nbytes)


@contextmanager
def within_limits(path: object) -> Iterator[None]:
    """Turn RecursionError and MemoryError of the block into CheckpointError."""
    # Neither names a file. The stack is unwound here, so there is room for a message.
    try:
        yield
    except (RecursionError, MemoryError) as error:
        what = "memory" if isinstance(error, MemoryError) else "levels of nesting"
        raise CheckpointError(
            f"{path} asks for more {what} than this process has. Nothing was loaded. "
            "The checkpoint is damaged or hostile, or needs a larger machine."
        ) from error


MANIFEST = "manifest.json"
TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}\Z")
"""Names of what ``appear`` makes, and an interrupt leaves behind."""


def path_text(path: object, what: str) -> str:
    """Return ``path`` as text. Raises: TypeError, naming ``what``, for a non-path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text.strip():
        raise TypeError(f"{what} expects a path, got {path!r}.")
    return text


def make_parents(path: str) -> None:
    """Make a directory and missing parents; on return, the names are on disk."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    if missing:
        os.makedirs(missing[0], exist_ok=True)
        # A new directory survives a power failure only if the parent has been synced.
        for each in missing:
            sync(os.path.dirname(each))


def no_checkpoint_text(path: str) -> str:
    """Return a sentence for a path without a checkpoint: what is there instead."""
    if os.path.isdir(path):
        inside = sorted(os.listdir(path))
        found = f"holds {listed(inside)}" if inside else "is an empty directory"
        return f"{path} {found}, and no checkpoint."
    if os.path.lexists(path):
        return f"{path} is no checkpoint."
    # A path is usually wrong in its last part: list what could have been meant.
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    beside = sorted(n for n in os.listdir(parent) if not n.startswith("."))
    return f"{path} does not exist; {parent} holds {listed(beside) or 'nothing'}."


def open_new(path: str) -> int:
    """Open a new file for writing; never overwrite a file, and never follow a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write_synced(path: str, data: bytes) -> None:
    """Write a new file; on return, the file is on the disk."""
    with named_errors(path), open(open_new(path), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync(path: str | os.PathLike[str]) -> None:
    """Write a file, or the names in a directory, to the disk."""
    with named_errors(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def put_file(path: str, data: bytes, *, absent: bool) -> None:
    """Write a small file at once: a reader sees no file, the old, or the new."""
    part = f"{path}.{secrets.token_hex(8)}.part"
    write_synced(part, data)
    sync(os.path.dirname(path))
    if absent and os.path.lexists(path):
        os.unlink(part)
        raise FileExistsError(errno.EEXIST, "File exists", path)
    with named_errors(path):
        os.replace(part, path)


def open_plain(path: str) -> int:
    """Open a regular file for reading, and return the file descriptor."""
    try:
        # A checkpoint from elsewhere: follow no link, and wait for no pipe.
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


def inner_file(directory: Path, name: object) -> Path:
    """Return the path of the regular file ``name`` in ``directory`` itself."""
    # A name of an unknown author must not open a file outside of the directory.
    plain = isinstance(name, str) and name not in ("", "..") and "\0" not in name
    if not isinstance(name, str) or not plain or PurePosixPath(name).name != name:
        raise CheckpointError(
            f"{directory} names the file {name!r}; expected the plain name of a file "
            "in that directory. The checkpoint is damaged or hostile: nothing of it "
            "was read."
        )
    path = directory / name
    try:
        mode, target = path.lstat().st_mode, path.resolve()
    except (OSError, RuntimeError, UnicodeError) as error:
        raise CheckpointError(
            f"{directory} names the file {name!r}, which cannot be opened: {error}. "
            "Copy the checkpoint again, with all its files."
        ) from error
    own = directory.resolve()
    allowed = [own]
    # Hugging Face's cache has links from ``snapshots/<revision>`` into ``blobs``.
    if own.parent.name == "snapshots":
        allowed.append(own.parent.parent / "blobs")
    # A link out of the directory could make a load read any file of the machine.
    if stat.S_ISLNK(mode) and target.parent not in allowed:
        raise CheckpointError(
            f"{path} is a symbolic link that leads out of its directory. Put the file "
            "itself in its place, if you trust it."
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file.")
    return path


@contextmanager
def appear(path: Path) -> Iterator[Path]:
    """Yield the path of a file or directory to make; name it ``path`` at the end."""
    target = str(path.absolute())
    _require_free(target)
    parent, name = os.path.split(target)
    # In the same parent directory: a rename is atomic only within a file system.
    work = Path(parent, f".{name}.tmp-{secrets.token_hex(8)}")
    out = work / "out"
    try:
        try:
            make_parents(parent)
            work.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"The directory {work} cannot be made ({error.strerror}: "
                f"{error.filename}); a checkpoint is written there first. Save where "
                "this process may write."
            ) from error
        yield out
        for each in (*out.rglob("*"), out):
            sync(each)
        _require_free(target)
        os.rename(out, target)
        sync(parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _require_free(path: str) -> None:
    """Raise CheckpointError if ``path`` exists, also as a broken link."""
    if os.path.lexists(path):
        raise CheckpointError(
            f"{path} exists already, and nothing is overwritten. Choose another name, "
            "or remove it first."
        )


def unwritable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint that failed to be written and was removed."""
    return CheckpointError(
        f"{path} could not be written: {error}. Nothing was left behind; free space or "
        "choose another destination."
    )
