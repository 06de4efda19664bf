"""Opening a checkpoint by what lies at its path."""

from __future__ import annotations

import os
from collections.abc import Callable

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import LATEST, MANIFEST, follow_latest
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.source import Source

_FORMATS: tuple[tuple[str, Callable[[str], bool], Callable[[str], Source]], ...] = (
    (
        f"a checkpoint of this library ({MANIFEST})",
        lambda path: os.path.lexists(os.path.join(path, MANIFEST)),
        NativeSource,
    ),
)
"""What a format is called, how it is recognised at a path, and what opens it."""


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open the checkpoint at ``path``, whatever its format.

    A directory with a text file ``latest`` and no checkpoint of its own stands for the
    checkpoint that the file names. Sends nothing.

    Raises: CheckpointError, if nothing known lies there, or it is damaged.

    >>> with open_source("runs") as source:  # doctest: +SKIP
    ...     print(source.model["head.weight"].shape)
    """
    path = os.path.abspath(path)
    for _, recognises, opener in _FORMATS:
        if recognises(path):
            return opener(path)
    if os.path.isfile(os.path.join(path, LATEST)):
        found = follow_latest(path)
        for _, recognises, opener in _FORMATS:
            if recognises(found):
                return opener(found)
        path = found
    there = "nothing" if not os.path.lexists(path) else "something else"
    raise CheckpointError(
        f"{path} holds {there}; expected {' or '.join(name for name, _, _ in _FORMATS)}"
        f", or a directory with a file {LATEST!r} that names one beside it."
    )
