"""Opens a checkpoint of any format; the files at a path tell the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.storage.bounds import within_limits
from composable_fsdp.storage.commit import Folder, folders_in, newest_in
from composable_fsdp.storage.directory import MANIFEST, no_checkpoint_text
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

    For a directory of checkpoints of this library, open the newest.

    Raises: CheckpointError, if no known format lies at ``path``, or the checkpoint is
    damaged or refused.
    Collective: none.

    >>> with open_source("runs") as source:
    ...     print(source.model["head.weight"].shape)
    (4, 4)
    """
    found, name = _find(path)
    with within_limits(found.path):
        if is_url(found.path):
            # Listed already, for the manifest and all files.
            return NativeSource(found.path, folder=found)
        return _FORMATS[name].opener(found.path)


def find_checkpoint(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the checkpoint that ``path`` stands for, and the format.

    The format is an element of ``FORMATS``.

    Raises: CheckpointError, if there is no checkpoint.
    """
    found, name = _find(path)
    return found.path, name


def _find(path: str | os.PathLike[str]) -> tuple[Folder, str]:
    """Return the place of the checkpoint that ``path`` stands for, and the format."""
    here = Folder(whole_path(path))
    path = here.path
    name = (NATIVE if here.is_committed else None) if is_url(path) else _format_at(path)
    # A checkpoint at ``path`` itself takes precedence over those in ``path``.
    if name is not None:
        return here, name
    newest = newest_in(path)
    if newest is not None:
        return newest, NATIVE
    if is_url(path):
        names = [split(each.path)[1] for each in folders_in(path)]
        told = f"uploads without a {MANIFEST} ({listed(names)})" if names else "nothing"
        raise CheckpointError(
            f"{path} holds {told}, and no checkpoint. Expected a checkpoint of this "
            f"library ({MANIFEST}), or a folder of such. Copy checkpoints of other "
            "formats to a local directory first."
        )
    words = [each.words for each in _FORMATS.values()]
    raise CheckpointError(
        f"{no_checkpoint_text(path)} Expected {', '.join(words[:-1])} or {words[-1]}, "
        "or a directory that holds checkpoints of this library."
    )


def _format_at(path: str) -> str | None:
    """Return the format of the checkpoint at ``path`` itself, or None."""
    return next((n for n, each in _FORMATS.items() if each.recognises(path)), None)
