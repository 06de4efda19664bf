"""Finds the storage of a URL by its scheme, and writes objects to the storage."""

from __future__ import annotations

from collections.abc import Callable

from composable_fsdp.storage.fsspec_storage import FsspecStorage
from composable_fsdp.storage.remote import Storage, is_url

_made: dict[str, Callable[[], Storage]] = {}
"""The storages of the user, by scheme."""
_open: dict[str, Storage] = {}
"""The storages in use, by scheme: connections are kept."""


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
    """Return the storage of a URL, and the name there.

    Raises: CheckpointError, if fsspec or the package of the scheme is not installed.
    """
    scheme, _, name = url.partition("://")
    # Connections and credentials are set up once per process and scheme.
    if scheme not in _open:
        if scheme in _made:
            _open[scheme] = _made[scheme]()
        else:
            _open[scheme] = FsspecStorage(scheme)
    return _open[scheme], name


class RemoteFile:
    """A new object at ``url``, written from beginning to end, as ``NewFile``.

    As a context manager, the object is discarded unless ``finish`` was called.
    """

    def __init__(self, url: str, nbytes: int) -> None:
        storage, name = storage_of(url)
        self._upload = storage.create(name)
        self._upload.expect(nbytes)
        self._finished = False

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``. Raises: OSError."""
        self._upload.write(memoryview(data))

    def finish(self) -> None:
        """Make the object appear, complete. Raises: OSError."""
        self._upload.finish()
        self._finished = True

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *exc: object) -> None:
        # An upload that is left alone is kept, and paid for, by an object store.
        if not self._finished:
            self._upload.discard()
