"""Judges a stranger's file before memory is spent on reading the file.

::

    manifest, index, metadata      size first, then one read
    zip archive                    a record or directory larger than the limit: refused
    recursion, memory              CheckpointError with the name of the file

No function here uses a collective.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import open_plain
from composable_fsdp.storage.new_file import named_errors

MAX_DOCUMENT = 1 << 30
"""The largest size of a file, or record, that is read whole, in bytes.

A manifest has 7 MB for a model of 70 billion parameters on 1,024 ranks.
"""


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
    """Return the content of a small regular file, whose size is judged first.

    Raises: CheckpointError, naming ``path``, for a file that is missing, not regular,
    or larger than ``MAX_DOCUMENT``.
    """
    handle = open_plain(path)
    with named_errors(path), open(handle, "rb") as found:
        nbytes = os.fstat(handle).st_size
        require_document(path, nbytes)
        # Another process may append to the file after the judgement.
        return found.read(nbytes)


@contextmanager
def within_limits(path: object) -> Iterator[None]:
    """Turn RecursionError and MemoryError of the block into CheckpointError."""
    # Both are subclasses of RuntimeError and Exception, and neither names a file. The
    # stack is unwound here, so building the message has room again.
    try:
        yield
    except (RecursionError, MemoryError) as error:
        what = "memory" if isinstance(error, MemoryError) else "levels of nesting"
        raise CheckpointError(
            f"{path} asks for more {what} than this process has. Nothing was loaded. "
            "The checkpoint is damaged or hostile, or needs a larger machine."
        ) from error


def bounded(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for zipfile, which reads as many bytes as an archive claims."""
    return cast("IO[bytes]", _BoundedFile(path))


class _BoundedFile(io.FileIO):
    """A file that refuses to read more than ``MAX_DOCUMENT`` bytes at a time."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most ``size`` bytes. Raises: BadZipFile, above ``MAX_DOCUMENT``."""
        # zipfile passes the size of the central directory that the end of the archive
        # claims, and FileIO allocates that size before reading.
        left = os.fstat(self.fileno()).st_size - self.tell()
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_DOCUMENT:
            raise zipfile.BadZipFile(f"its directory has {wanted} bytes")
        return super().read(max(wanted, 0)) or b""
