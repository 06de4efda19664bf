"""Opening a checkpoint of any format; what it is, is seen from what lies there."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.formats.dcp_metadata import METADATA
from composable_fsdp.storage.formats.dcp_read import open_dcp
from composable_fsdp.storage.formats.safetensors_read import (
    INDEX,
    SINGLE,
    SafetensorsSource,
)
from composable_fsdp.storage.formats.torch_read import open_torch
from composable_fsdp.storage.source import Source

Format = str
NATIVE, DCP, SAFETENSORS, TORCH = FORMATS = ("native", "dcp", "safetensors", "torch")


def format_of(path: Path) -> Format:
    """Which of ``FORMATS`` stands at ``path``. Reads a few bytes at most.

    Raises: CheckpointError, if there is nothing, or nothing that is known.
    """
    if path.is_dir():
        if (path / METADATA).exists():
            return DCP
        if any((path / name).exists() for name in (INDEX, SINGLE)):
            return SAFETENSORS
        raise CheckpointError(
            f"{path} is a directory without a checkpoint that is known: expected "
            f"{METADATA} (torch.distributed.checkpoint) or {SINGLE} or {INDEX} "
            "(safetensors). Pass the directory that holds one of them."
        )
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error}.") from error
    # Safetensors: the length of a JSON object, then the object.
    return SAFETENSORS if start[8:] == b"{" else TORCH


def open_any(path: str | PathLike[str]) -> Source:
    """Open the checkpoint at ``path``, whatever its format. Runs no pickle.

    Raises: CheckpointError, if it is damaged, incomplete, refused, or of no known
    format.
    """
    where = Path(path)
    kind = format_of(where)
    if kind == DCP:
        return open_dcp(where)
    if kind == SAFETENSORS:
        return SafetensorsSource(where)
    return open_torch(where)
