"""Writes a large file, past the page cache or through the page cache in a stream.

::

    past      data ──copy──> buffer, at a page boundary ──full──> disk   (O_DIRECT)
    through   data ──write──> page cache ──4 MiB at a time──> disk       (stays cached)

A load right after the save, after a spike of the loss or for an evaluation, finds the
file in the page cache. Without memory to spare, the file goes past the cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

BUFFER = 4 << 20
"""The size of the buffer in bytes; a full buffer is written at once."""
_ALIGNMENT = 4096
"""The unit of ``O_DIRECT`` writes in bytes."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_BEHIND = 8 * BUFFER
"""The most bytes in the page cache that are not on the disk yet."""
_START, _FINISH = 2, 7
"""Flags of ``sync_file_range``: begin to write; wait, write what is left and wait."""
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}
"""Errors of systems that cannot write a part of a file out."""


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


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call, or None where there is none (macOS)."""
    # Python has no binding. The call starts the disk before ``fsync`` and, unlike
    # ``fdatasync``, waits neither for the journal nor for the cache of the disk.
    found = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


class NewFile:
    """A new file, written from beginning to end.

    ``O_DIRECT`` requires that the file offset, the buffer's address and the length are
    multiples of the disk's block size. The end of the file is therefore written through
    the page cache; so is the whole file if ``O_DIRECT`` is refused (tmpfs, macOS).
    """

    def __init__(self, path: str, *, keep: bool = False) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with named_errors(path):
            self._file = os.open(path, flags, 0o666)
        # Mapped memory starts at a page boundary. Do not close the map explicitly: the
        # traceback of an error may hold a view of the map, and the memory is freed with
        # the last view.
        self._buffer = memoryview(mmap.mmap(-1, BUFFER))
        self._filled = 0
        # Past the cache, a checkpoint takes no memory from other processes, and costs
        # no copy.
        self._is_direct = not keep and self._set_direct(True)
        self._sync_range = None if self._is_direct else _sync_file_range()
        # Bytes that were written, begun to be written out, and are on the disk.
        self._written = self._begun = self._on_disk = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; bytes that do not fill the buffer stay in the buffer.

        Raises: OSError.
        """
        at, size = 0, len(data)
        while at < size:
            # The page cache needs no aligned memory, so large data need no copy.
            if not self._is_direct and not self._filled and size - at >= BUFFER:
                self._write_out(memoryview(data)[at : at + BUFFER])
                at += BUFFER
                continue
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

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _flush(self) -> None:
        """Write the content of the buffer."""
        self._write_out(self._buffer[: self._filled])
        self._filled = 0

    def _write_out(self, data: memoryview) -> None:
        """Write ``data``, and let the disk follow."""
        done, end = 0, len(data)
        while done < end:
            stop = end
            if self._is_direct:
                stop = end - (end - done) % _ALIGNMENT
                if stop == done:
                    self._is_direct = self._set_direct(False)
                    continue
            try:
                done += os.write(self._file, data[done:stop])
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
        self._written += end
        self._stream()

    def _stream(self) -> None:
        """Begin to write the page cache out, and wait for the oldest part."""
        # The disk writes while the next data are copied. Without a limit, a checkpoint
        # would fill the page cache with pages that cannot be freed.
        while not self._is_direct and self._written - self._begun >= BUFFER:
            self._sync(self._begun, _START)
            self._begun += BUFFER
        while self._begun - self._on_disk > _BEHIND:
            self._sync(self._on_disk, _FINISH)
            self._on_disk += BUFFER

    def _sync(self, at: int, flags: int) -> None:
        """Write ``BUFFER`` bytes from byte ``at`` out; without the call do nothing."""
        if self._sync_range is None:
            return
        if self._sync_range(self._file, at, BUFFER, flags):
            code = ctypes.get_errno()
            if code not in _UNKNOWN:
                # The system tells an error once: the ``fsync`` at the end would pass.
                raise OSError(code, os.strerror(code), self._path)
            self._sync_range = None

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
