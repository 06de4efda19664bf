"""Storage that is no file system: the methods of a storage, and paths of both kinds.

::

    /runs/step-1, file:///runs/step-1      local files: rename, O_DIRECT
    s3://bucket/runs/step-1, memory://..   a Storage: a marker is written last
    mine://..                              a Storage of the user: register_storage

An object store has no rename and no directories, so a checkpoint there is committed by
its manifest, which is written last. No function here uses a collective.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from composable_fsdp.errors import CheckpointError

# Two letters at least: a scheme of a single letter is a drive of Windows.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<name>.*)\Z", re.DOTALL)


class StoredObject(NamedTuple):
    """An object that ``Storage.list`` found."""

    name: str
    """The whole name, as the other methods take it."""
    nbytes: int
    """The size in bytes."""
    time: datetime
    """The time of the last change, with a time zone."""


class Upload(ABC):
    """A new object that is written from beginning to end."""

    def expect(self, nbytes: int) -> None:  # noqa: B027  # a default, not forgotten
        """Learn about how many bytes will be written; called before the first.

        Stores that take an object in a limited number of parts choose their size.
        """

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append ``data``, which may change after the call. Raises: OSError."""

    @abstractmethod
    def finish(self) -> None:
        """Make the object appear, complete and durable. Raises: OSError."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the bytes that were written; the object does not appear."""


class Storage(ABC):
    """Where checkpoints lie; names are texts whose parts are divided by ``/``.

    Implement these six methods, and pass the class to ``register_storage``. Methods are
    called from several threads at the same time, and from several processes. A missing
    object raises FileNotFoundError, every other failure OSError.
    """

    @abstractmethod
    def create(self, name: str) -> Upload:
        """Begin a new object. Raises: FileExistsError, if there is one."""

    @abstractmethod
    def put(self, name: str, data: bytes, *, absent: bool) -> None:
        """Write a small object at once: a reader sees no object, the old, or the new.

        Args:
            name: the name.
            data: the content.
            absent: raise FileExistsError if there is an object of that name.
        """

    @abstractmethod
    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)``, or fewer at the end of the object.

        Args:
            name: the name.
            begin: the first byte.
            end: the byte after the last.
        """

    @abstractmethod
    def list(self, folder: str) -> Iterable[StoredObject]:
        """Return all objects whose name begins with ``folder`` and ``/``."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; an object that is not there is no error."""


def is_url(path: object) -> bool:
    """Return whether ``path`` is a URL of a storage; ``file://`` is a local path."""
    found = _URL.match(path) if isinstance(path, str) else None
    return found is not None and found["scheme"] != "file"


def whole_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path, or a URL without a slash at the end.

    >>> whole_path("s3://bucket/runs/"), whole_path("file:///runs/a%20b")
    ('s3://bucket/runs', '/runs/a b')
    """
    text = os.fspath(path)
    if is_url(text):
        scheme, _, name = text.partition("://")
        # ``memory://`` alone is the root of that storage.
        return f"{scheme}://{name.rstrip('/')}"
    if text.startswith("file://"):
        # A file URL escapes spaces and other characters.
        text = unquote(urlsplit(text).path)
    return os.path.abspath(text)


def join(path: str, *parts: str) -> str:
    """Return a path below ``path``, which is local or a URL."""
    # Object stores divide names by "/" on every system.
    if is_url(path):
        return "/".join([path, *parts])
    return os.path.join(path, *parts)


def split(path: str) -> tuple[str, str]:
    """Return the folder that holds ``path``, and the last part of ``path``."""
    if not is_url(path):
        return os.path.split(path)
    scheme, _, name = path.partition("://")
    folder, _, last = name.rpartition("/")
    return f"{scheme}://{folder}", last


def require_local(path: object, what: str) -> None:
    """Raise CheckpointError for a URL where ``what`` needs local files."""
    if is_url(path):
        raise CheckpointError(
            f"{what} works on local files, got {path}. Checkpoints of this library "
            "(save, load, async_save, checkpoints, verify, convert from them) can lie "
            "at URLs; copy this one to a local directory first."
        )
