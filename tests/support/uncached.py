"""A file system that keeps nothing in memory, as some over a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from composable_fsdp.storage.file_bytes import _LocalBytes


@contextmanager
def uncached(is_uncached: bool = True) -> Iterator[None]:
    """Let loads in the block keep what they verify in memory of their own."""
    real = _LocalBytes.stays_in_cache
    with mock.patch.object(
        _LocalBytes,
        "stays_in_cache",
        lambda self: not is_uncached and real(self),
    ):
        yield
