"""Reads intervals of bytes of a file or of an object in a storage.

::

    in the page cache     copied from there
    needed twice          read through the cache, by several threads
    needed once           read past the cache (O_DIRECT), by several threads
    at a URL              a request per interval

Through the cache, a read costs a copy and a page for each 4 KiB. A load that verifies
all bytes before the first is copied finds them there.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import open_plain
from composable_fsdp.storage.storages import is_url, split, storage_of

_PAGE = 4096
"""The unit of reads past the page cache, in bytes."""
_SMALL = 1 << 16
"""Reads of fewer bytes go through the page cache, which reads ahead."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class FileBytes(ABC):
    """An open file; methods may be called from several threads."""

    nbytes: int
    """The size of the file."""

    @abstractmethod
    def read(self, parts: Sequence[memoryview], at: int) -> int:
        """Fill ``parts`` from byte ``at``; return the number of bytes. Raises: OSError.

        Fewer bytes than asked for may be read.
        """

    @abstractmethod
    def load(self, at: int, nbytes: int, *, keep: bool = False) -> memoryview | None:
        """Return ``nbytes`` from byte ``at``; None if they cannot be read at once."""

    def stays_in_cache(self) -> bool:
        """Return whether the system keeps in memory what is read of the file."""
        return False

    def is_cached(self, at: int) -> bool:
        """Return whether byte ``at`` is in memory, as far as the system tells."""
        return False

    def give_back(self, data: memoryview) -> None:  # noqa: B027  # a default
        """Let a later ``load`` use the memory of a result, which is not used now."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


def open_bytes(path: str, sizes: Mapping[str, int] | None = None) -> FileBytes:
    """Open a file of a checkpoint, at a path or URL.

    Raises: CheckpointError, naming ``path``, if the file is missing or not regular.
    """
    return _RemoteBytes(path, sizes) if is_url(path) else _LocalBytes(path)


class _LocalBytes(FileBytes):
    """A regular file."""

    def __init__(self, path: str) -> None:
        self._handle = open_plain(path)
        self._direct = -1
        # Memory that the kernel has not zeroed before costs more than the read.
        self._spare: deque[mmap.mmap] = deque()
        self.nbytes = os.fstat(self._handle).st_size
        # Without O_DIRECT (tmpfs, macOS), all reads go through the page cache.
        if _DIRECT and _NOWAIT and self.nbytes >= _SMALL:
            with suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | _DIRECT
                self._direct = os.open(path, flags)

    def read(self, parts: Sequence[memoryview], at: int) -> int:
        """Fill ``parts``; see ``FileBytes``."""
        return os.preadv(self._handle, parts, at)

    def stays_in_cache(self) -> bool:
        """Return whether a second read needs no disk; see ``FileBytes``."""
        # File systems over a network or in user space may pass each read on, and then
        # refuse a read that may not wait.
        if not _NOWAIT:
            return False
        data = bytearray(min(self.nbytes, _PAGE))
        with suppress(OSError):
            os.preadv(self._handle, [data], 0)
            return os.preadv(self._handle, [data], 0, _NOWAIT) == len(data)
        return False

    def is_cached(self, at: int) -> bool:
        """Return whether byte ``at`` is in the page cache; see ``FileBytes``."""
        with suppress(OSError):
            return bool(
                _NOWAIT and os.preadv(self._handle, [bytearray(1)], at, _NOWAIT)
            )
        return False

    def load(self, at: int, nbytes: int, *, keep: bool = False) -> memoryview | None:
        """Return ``nbytes`` from byte ``at``; see ``FileBytes``."""
        # Whole pages around the interval, in mapped memory, which begins at a page.
        low = at // _PAGE * _PAGE
        high = -(-(at + nbytes) // _PAGE) * _PAGE
        buffer = self._buffer(high - low)
        wanted = at - low + nbytes
        # Only what is in the page cache, without waiting for the disk.
        ways = [(self._handle, _NOWAIT), (self._direct, 0)]
        if keep or nbytes < _SMALL or self._direct < 0:
            ways = [(self._handle, 0)]
        for handle, flags in ways:
            # A file system may refuse either way; the caller reads plainly then.
            with suppress(OSError):
                given = (flags,) if flags else ()
                if os.preadv(handle, [buffer], low, *given) >= wanted:
                    return buffer[at - low : wanted]
        return None

    def _buffer(self, nbytes: int) -> memoryview:
        """Return memory for a read, used before if possible."""
        # ``pop`` is atomic: several threads read.
        with suppress(IndexError):
            found = self._spare.pop()
            if len(found) >= nbytes:
                return memoryview(found)[:nbytes]
        return memoryview(mmap.mmap(-1, nbytes))

    def give_back(self, data: memoryview) -> None:
        """Keep the memory of ``data``; see ``FileBytes``."""
        if isinstance(data.obj, mmap.mmap):
            self._spare.append(data.obj)

    def close(self) -> None:
        """Close the file."""
        self._spare.clear()
        for handle in (self._handle, self._direct):
            # Nothing was written, so a failure of the system loses nothing.
            with suppress(OSError):
                if handle >= 0:
                    os.close(handle)


class _RemoteBytes(FileBytes):
    """An object in a storage."""

    def __init__(self, url: str, sizes: Mapping[str, int] | None) -> None:
        self._storage, self._name = storage_of(url)
        folder, name = split(self._name)
        # A listing is a request per thousand objects, and a rank may open the files of
        # all ranks of the save.
        if sizes is not None:
            found = [sizes[name]] if name in sizes else []
        else:
            listed = self._storage.list(folder)
            found = [each.nbytes for each in listed if self._is(each.name)]
        if not found:
            raise CheckpointError(
                f"{url} cannot be opened (there is no such object); expected a file of "
                "a checkpoint. Use another checkpoint."
            )
        self.nbytes = found[0]

    def _is(self, name: str) -> bool:
        """Return whether ``name`` is the name of the object."""
        # Memory of fsspec begins names with a slash.
        return name.strip("/") == self._name.strip("/")

    def read(self, parts: Sequence[memoryview], at: int) -> int:
        """Fill ``parts`` by one request; see ``FileBytes``."""
        data = self._storage.read(self._name, at, at + sum(map(len, parts)))
        begin = 0
        for part in parts:
            piece = data[begin : begin + len(part)]
            part[: len(piece)] = piece
            begin += len(part)
        return len(data)

    def load(self, at: int, nbytes: int, *, keep: bool = False) -> memoryview | None:
        """Return ``nbytes`` from byte ``at``; see ``FileBytes``."""
        try:
            data = self._storage.read(self._name, at, at + nbytes)
        except OSError:
            return None
        return memoryview(data) if len(data) == nbytes else None

    def close(self) -> None:
        """Do nothing: a storage has no open files."""
