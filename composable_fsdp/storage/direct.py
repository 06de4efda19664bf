"""Writing a large file past the page cache, where the file system allows it.

The kernel's cache costs a copy, and a page to be found and cleared, for every 4 KiB of
a checkpoint that nobody will read soon, and takes memory from those who need it. With
``O_DIRECT`` the disk reads our buffer::

    data ──copy──> buffer, at a page boundary ──full──> disk

File, buffer and length must be multiples of a block of the disk, so the end of the file
goes the ordinary way; all of it does where ``O_DIRECT`` is refused (tmpfs, macOS).
"""

from __future__ import annotations

import fcntl
import mmap
import os

BUFFER = 4 << 20
"""Bytes that are written at once."""
_ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file of ``path``, written from its beginning to its end."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o666)
        # Mapped memory begins at a page. It goes with its last view, which an error's
        # traceback may hold.
        self._buffer = memoryview(mmap.mmap(-1, BUFFER))
        self._filled = 0
        self._is_direct = self._set_direct(True)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; what does not fill the buffer waits there.

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
        """Write what waits, and have everything on the disk when this returns."""
        self._flush()
        os.fsync(self._file)

    def close(self) -> None:
        """Give the file back, whatever has been written."""
        os.close(self._file)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _flush(self) -> None:
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
                    raise
                # Some file systems take the flag and refuse the write.
                self._is_direct = self._set_direct(False)
                continue
            if self._is_direct and done % _ALIGNMENT:
                # Cut short, by a limit or a full disk: the next write says by which.
                self._is_direct = self._set_direct(False)
        self._filled = 0

    def _set_direct(self, wanted: bool) -> bool:
        if not _DIRECT:
            return False
        try:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            flags = flags | _DIRECT if wanted else flags & ~_DIRECT
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return wanted
