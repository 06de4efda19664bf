"""A directory that torch.distributed.checkpoint loads, written one tensor at a time.

DCP's own writer keeps every tensor until its file is done. Its format is plain: saved
objects one after the other in a file, and a pickled table of where each lies, which
here is made of DCP's own classes. Keys and paths are those that its planner makes of
``{"model": ..., "optim": ..., "extra": ...}``, so a user's ``dcp.load`` finds them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.formats.dcp_metadata import METADATA
from composable_fsdp.storage.formats.dcp_read import NOTES
from composable_fsdp.storage.formats.tree import DeferredTensor, nested_tree
from composable_fsdp.storage.source import Source

DATA = "__0_0.distcp"


def write_dcp(out: Path, source: Source) -> None:
    """Make the directory ``out``. Holds one tensor at a time."""
    # Here and below, because it loads half of torch.distributed, FSDP included, which
    # who only imports this package should not wait for.
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    out.mkdir()
    tree = nested_tree(source)
    leaves = list(_leaves(tree, ()))
    empty = [path for path, value in leaves if isinstance(value, dict)]
    if source.aliases or empty:
        notes = {"aliases": dict(source.aliases), "empty": empty}
        leaves.append(((NOTES,), json.dumps(notes)))
    metadata = Metadata({}, planner_data={}, storage_data={}, version="1.0.0")
    metadata.storage_meta = StorageMeta()
    with (out / DATA).open("wb") as file:
        for path, value in leaves:
            # DCP has no entry for these, and one would make its loader take the
            # directory for one of an old version.
            if path not in empty:
                _write(file, metadata, path, value)
    with (out / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What DCP's planner saves apart: dicts are gone into, lists if tensors are in."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{'.'.join(map(str, path))} has the key {key!r}, and DCP's are "
                    "text. Convert with --weights-only, or to torch."
                )
            yield from _leaves(each, (*path, key))
    elif isinstance(value, list) and _has_parts(value):
        for i, each in enumerate(value):
            yield from _leaves(each, (*path, i))
    else:
        yield path, value


def _has_parts(values: list[Any]) -> bool:
    return any(
        isinstance(each, Mapping | DeferredTensor | Tensor)
        or (isinstance(each, list) and _has_parts(each))
        for each in values
    )


def _write(file: BinaryIO, metadata: Any, path: tuple[Any, ...], value: Any) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    key = ".".join(map(str, path))
    value = value.read() if isinstance(value, DeferredTensor) else value
    begin, offset = file.tell(), None
    torch.save(value, file)
    if isinstance(value, Tensor):
        offset = torch.Size([0] * value.ndim)
        chunk = ChunkStorageMetadata(offsets=offset, sizes=value.shape)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=value.dtype), value.shape, [chunk]
        )
    else:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.planner_data[key] = path
    place = _StorageInfo(DATA, begin, file.tell() - begin)
    metadata.storage_data[MetadataIndex(key, offset)] = place
