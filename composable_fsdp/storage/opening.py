"""Opens a checkpoint of any format; the files at a path tell the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.storage.bounds import within_limits
from composable_fsdp.storage.commit import has_newest, interrupted, newest_in
from composable_fsdp.storage.directory import LATEST, MANIFEST, no_checkpoint_text
from composable_fsdp.storage.formats.dcp_metadata import METADATA
from composable_fsdp.storage.formats.dcp_read import open_dcp
from composable_fsdp.storage.formats.safetensors_read import (
    INDEX,
    SINGLE,
    SafetensorsSource,
    is_safetensors,
)
from composable_fsdp.storage.formats.torch_read import is_torch_file, open_torch
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.remote import is_url, split, whole_path
from composable_fsdp.storage.remote_commit import (
    Marked,
    folder_at,
    folders_in,
    newest_remote,
)
from composable_fsdp.storage.source import Source


class _Format(NamedTuple):
    """A format: words for messages, a test for a path, and a function that opens."""

    words: str
    recognises: Callable[[str], bool]
    opener: Callable[[str], Source]


def _holds(*names: str) -> Callable[[str], bool]:
    """Return a test for a directory that contains any of ``names``."""
    # ``lexists``: the reader of the format reports a broken link.
    return lambda path: any(os.path.lexists(os.path.join(path, n)) for n in names)


NATIVE, DCP, SAFETENSORS, TORCH = "native", "dcp", "safetensors", "torch"
# In the order of the tests: the formats of directories before the formats of files.
_FORMATS: dict[str, _Format] = {
    NATIVE: _Format(
        f"a checkpoint of this library ({MANIFEST})", _holds(MANIFEST), NativeSource
    ),
    DCP: _Format(
        f"one of torch.distributed.checkpoint ({METADATA})",
        _holds(METADATA),
        lambda path: open_dcp(Path(path)),
    ),
    SAFETENSORS: _Format(
        f"safetensors (a file, or {SINGLE} or {INDEX})",
        lambda path: _holds(SINGLE, INDEX)(path) or is_safetensors(path),
        lambda path: SafetensorsSource(Path(path)),
    ),
    TORCH: _Format(
        "a torch.save file", is_torch_file, lambda path: open_torch(Path(path))
    ),
}
FORMATS = tuple(_FORMATS)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open the checkpoint at ``path``, of any format; run no code of a pickle.

    For a directory with a text file ``latest`` and no checkpoint in it, open the
    checkpoint that the file names, or a newer one whose commit was interrupted.

    Raises: CheckpointError, if no known format lies at ``path``, or the checkpoint is
    damaged or refused.
    Collective: none.

    >>> with open_source("runs") as source:
    ...     print(source.model["head.weight"].shape)
    (4, 4)
    """
    path = whole_path(path)
    if is_url(path):
        marked = _find_at_url(path)
        with within_limits(marked.url):
            return NativeSource(marked.url, folder=marked)
    found, name = find_checkpoint(path)
    with within_limits(found):
        return _FORMATS[name].opener(found)


def find_checkpoint(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the checkpoint that ``path`` stands for, and the format.

    The format is an element of ``FORMATS``.

    Raises: CheckpointError, if there is no checkpoint.
    """
    asked = path = whole_path(path)
    if is_url(path):
        return _find_at_url(path).url, NATIVE
    name = _format_at(path)
    # A checkpoint at ``path`` itself takes precedence over ``latest``. ``latest`` is
    # followed only once, so no chain of directories can lead in a circle.
    if name is None and has_newest(path):
        path = newest_in(path)
        name = _format_at(path)
    elif name is None and (found := interrupted(path)):
        path, name = found, NATIVE
    if name is not None:
        return path, name
    # The message names the file ``latest``, if ``latest`` has led to this path.
    where = "" if path == asked else f", which {os.path.join(asked, LATEST)} names,"
    text = no_checkpoint_text(path, where)
    words = [each.words for each in _FORMATS.values()]
    raise CheckpointError(
        f"{text} Expected {', '.join(words[:-1])} or {words[-1]}, or a directory with "
        f"a file {LATEST!r} that names one beside it."
    )


def _find_at_url(url: str) -> Marked:
    """Return the checkpoint at ``url``, or the newest below ``url``, as listed.

    Raises: CheckpointError, if there is none; OSError.
    """
    found = folder_at(url)
    if found.is_committed:
        return found
    # There is no file ``latest``, which could not be replaced in the same request as
    # the marker is written.
    newest = newest_remote(url)
    if newest is not None:
        return newest
    names = [split(each.url)[1] for each in folders_in(url)]
    uploads = f"holds uploads without a {MANIFEST} ({listed(names)})" if names else ""
    raise CheckpointError(
        f"{url} {uploads or 'holds nothing'}, and no checkpoint. Expected a checkpoint "
        f"of this library ({MANIFEST}), or a folder of such. Copy checkpoints of other "
        "formats to a local directory first."
    )


def _format_at(path: str) -> str | None:
    """Return the format of the checkpoint at ``path`` itself, or None."""
    return next((n for n, each in _FORMATS.items() if each.recognises(path)), None)
