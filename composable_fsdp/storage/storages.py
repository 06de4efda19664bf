"""Finds the storage of a URL by its scheme: fsspec's, or one of the user."""

from __future__ import annotations

import errno
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple
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

        ``absent``: raise FileExistsError if there is an object of that name.
        """

    @abstractmethod
    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)``, or fewer at the end of the object."""

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
    """Return an absolute path, or a URL without a slash at the end."""
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
            f"{what} works on local files, got {path}. Only checkpoints of this "
            "library can lie at URLs; use a local directory."
        )


_TIMES = ("LastModified", "mtime", "last_modified", "modified", "updated", "created")
"""The keys under which file systems of fsspec tell the time of a change."""
_PART = 16 << 20
"""The smallest part of an upload in bytes; each part is a request."""
_MOST_PARTS = 9_000
"""The number of parts of an upload; S3 takes 10,000, and sizes are only about right."""


class FsspecStorage(Storage):
    """The file system of a URL scheme that fsspec knows."""

    def __init__(self, scheme: str) -> None:
        try:
            # Imported at the first use of a URL: the package works without fsspec.
            import fsspec

            # Other ranks and jobs write, too: a list that was kept would be old.
            options = {"use_listings_cache": False}
            self._files: Any = fsspec.filesystem(scheme, **options)
            # fsspec has no flag for it: clients of object stores are asynchronous.
            self._is_object_store = bool(getattr(self._files, "async_impl", False))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{scheme}:// cannot be opened: {error}. Install fsspec and the "
                "package of the scheme (s3fs for S3, gcsfs for gs://), or call "
                f"storage.register_storage({scheme!r}, ..) with a class of your own."
            ) from error

    def create(self, name: str) -> Upload:
        with _as_os_error(name):
            # Names are new in each attempt: no other writer comes in between.
            if self._files.exists(name):
                raise FileExistsError(errno.EEXIST, "File exists", name)
            self._make_folder(name)
            return _FsspecUpload(self._files, name)

    def put(self, name: str, data: bytes, *, absent: bool) -> None:
        with _as_os_error(name):
            self._make_folder(name)
            # Object stores compare in the same request, and show only what is complete.
            mode = "create" if absent else "overwrite"
            if self._is_object_store:
                self._files.pipe_file(name, data, mode=mode)
                return
            if absent and self._files.exists(name):
                raise FileExistsError(errno.EEXIST, "File exists", name)
            # Half a marker under its own name would be taken for a checkpoint.
            part = f"{name}.{secrets.token_hex(8)}.part"
            self._files.pipe_file(part, data)
            self._files.mv(part, name)

    def read(self, name: str, begin: int, end: int) -> bytes:
        # Object stores refuse the range of an empty interval.
        if begin == end:
            return b""
        with _as_os_error(name):
            data: bytes = self._files.cat_file(name, start=begin, end=end)
            return data

    def list(self, folder: str) -> Iterable[StoredObject]:
        with _as_os_error(folder):
            self._files.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._files.find(folder, detail=True)
        for name, about in found.items():
            # ``find`` of an object itself returns that object.
            if name.strip("/") != folder.strip("/"):
                yield StoredObject(name, int(about["size"] or 0), _time(about))

    def delete(self, name: str) -> None:
        # Two saves may tidy up at the same time.
        with _as_os_error(name), suppress(FileNotFoundError):
            self._files.rm_file(name)

    def _make_folder(self, name: str) -> None:
        """Make the folder of an object, where a file system has folders."""
        folder = name.rpartition("/")[0]
        # A bucket is made by its owner, with rights and a region.
        if folder.strip("/").count("/"):
            self._files.makedirs(folder, exist_ok=True)


class _FsspecUpload(Upload):
    """A file of fsspec, opened when its size is known."""

    def __init__(self, files: Any, name: str) -> None:
        self._files, self._name = files, name
        self._file: Any = None

    def expect(self, nbytes: int) -> None:
        # A part waits in memory. In whole MiB, as some stores ask for multiples.
        needed = -(-nbytes // _MOST_PARTS)
        part = max(_PART, -(-needed >> 20) << 20)
        with _as_os_error(self._name):
            self._file = self._files.open(self._name, "wb", block_size=part)

    def write(self, data: memoryview) -> None:
        with _as_os_error(self._name):
            # A copy: a file of fsspec may keep the bytes until a part is full.
            self._file.write(bytes(data))

    def finish(self) -> None:
        """Close the file, at which an object store shows the object."""
        with _as_os_error(self._name):
            # The last part is sent here: its error comes before the marker.
            self._file.close()

    def discard(self) -> None:
        """Abort the upload, and remove the file of a file system without uploads."""
        # The error that led here is the one to tell.
        with suppress(Exception):
            if hasattr(self._file, "discard"):
                self._file.discard()
            # ``__del__`` would close, and so finish, the upload.
            if self._file is not None:
                self._file.closed = True
        with suppress(Exception):
            self._files.rm_file(self._name)


@contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """Turn every error of the block into an OSError that names the object."""
    try:
        yield
    except OSError as error:
        # The file systems of fsspec put the name into the text, or nowhere.
        if error.filename is None:
            number = error.errno or errno.EIO
            text = error.strerror or str(error) or type(error).__name__
            raise type(error)(number, text, name) from error
        raise
    except Exception as error:
        # Clients of object stores raise many kinds of errors.
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", name) from error


def _time(about: Mapping[str, Any]) -> datetime:
    """Return the time of the last change; the epoch, if the file system tells none."""
    told = next((about[key] for key in _TIMES if about.get(key) is not None), 0.0)
    # Some file systems give the text of their server.
    if isinstance(told, str):
        told = datetime.fromisoformat(told.replace("Z", "+00:00"))
    # Times without a zone are those of the server, which are UTC.
    if isinstance(told, datetime):
        return told if told.tzinfo else told.replace(tzinfo=timezone.utc)
    return datetime.fromtimestamp(float(told), timezone.utc)


_made: dict[str, Callable[[], Storage]] = {}
_open: dict[str, Storage] = {}


def register_storage(scheme: str, make: Callable[[], Storage]) -> None:
    """Use a storage for all URLs ``scheme://..`` in this process.

    ``make`` is called once, before the first use. Register on every rank. A scheme that
    fsspec knows (``s3``, ``gs``) is replaced.

    Raises: ValueError, for a scheme that no URL can have.

    >>> register_storage("scratch", lambda: FsspecStorage("memory"))
    >>> checkpoints("scratch://nothing-saved-here")
    []
    """
    if not is_url(f"{scheme}://"):
        raise ValueError(
            f"register_storage expects a scheme such as 'mine', of letters and digits "
            f"and not 'file', got {scheme!r}."
        )
    # A storage in use is dropped, so that the next call makes the new one.
    _made[scheme] = make
    _open.pop(scheme, None)


def storage_of(url: str) -> tuple[Storage, str]:
    """Return the storage of a URL, and the name there."""
    scheme, _, name = url.partition("://")
    # Connections and credentials are set up once per process and scheme.
    if scheme not in _open:
        _open[scheme] = _made.get(scheme, partial(FsspecStorage, scheme))()
    return _open[scheme], name
