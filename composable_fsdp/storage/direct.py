"""Writes a large file without the page cache, if the file system supports ``O_DIRECT``.

::

    data ──copy──> buffer, at a page boundary ──full──> disk
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

BUFFER = 4 << 20
"""The size of the buffer in bytes; a full buffer is written at once."""
_ALIGNMENT = 4096
"""The unit of ``O_DIRECT`` writes in bytes."""
_DIRECT = getattr(os, "O_DIRECT", 0)


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


class DirectFile:
    """A new file at ``path``, written from beginning to end.

    ``O_DIRECT`` requires that the file offset, the buffer's address and the length are
    multiples of the disk's block size. The end of the file is therefore written through
    the page cache; so is the whole file if ``O_DIRECT`` is refused (tmpfs, macOS).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with named_errors(path):
            self._file = os.open(path, flags, 0o666)
        # Mapped memory starts at a page boundary. Do not close the map explicitly: the
        # traceback of an error may hold a view of the map, and the memory is freed with
        # the last view.
        self._buffer = memoryview(mmap.mmap(-1, BUFFER))
        self._filled = 0
        # The page cache would cost a copy and a free page for every 4 KiB of a
        # checkpoint that no process will read soon, and takes memory from other
        # processes.
        self._is_direct = self._set_direct(True)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; bytes that do not fill the buffer stay in the buffer.

        Raises: OSError.
        """
        at, size = 0, len(data)
        while at < size:
            count = min(size - at, BUFFER - self._filled)
            self._buffer[self._filled : self._filled + count] = data[at : at + count]
            self._filled += count
            at += count
            if self._filled == BUFFER:
                self._flush()

    def finish(self) -> None:
        """Write the rest of the buffer; on return, all bytes are on the disk."""
        self._flush()
        with named_errors(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file; bytes in the buffer are lost."""
        with named_errors(self._path):
            os.close(self._file)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _flush(self) -> None:
        """Write the content of the buffer."""
        done, end = 0, self._filled
        while done < end:
            stop = end
            if self._is_direct:
                stop = end - (end - done) % _ALIGNMENT
                if stop == done:
                    self._is_direct = self._set_direct(False)
                    continue
            try:
                done += os.write(self._file, self._buffer[done:stop])
            except OSError:
                if not self._is_direct:
                    with named_errors(self._path):
                        raise
                # Some file systems accept the flag and refuse the write.
                self._is_direct = self._set_direct(False)
                continue
            # The write was cut short by a limit or a full disk, and the offset is no
            # longer aligned. The next write, without ``O_DIRECT``, raises the real
            # error.
            if self._is_direct and done % _ALIGNMENT:
                self._is_direct = self._set_direct(False)
        self._filled = 0

    def _set_direct(self, wanted: bool) -> bool:
        """Switch ``O_DIRECT`` on or off; return whether ``O_DIRECT`` is on."""
        if not _DIRECT:
            return False
        try:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            flags = flags | _DIRECT if wanted else flags & ~_DIRECT
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return wanted
