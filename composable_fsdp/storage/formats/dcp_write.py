"""Writes a directory for torch.distributed.checkpoint (DCP), tensor by tensor.

The keys and paths are those that DCP's planner makes of ``{"model": ..., "optim": ...,
"extra": ...}``, so a user's ``dcp.load`` finds them.
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
from composable_fsdp.storage.formats.nested import nested_tree
from composable_fsdp.storage.source import LazyTensor, Source

DATA = "__0_0.distcp"


def write_dcp(out: Path, source: Source) -> None:
    """Make the directory ``out``. Memory holds a single tensor at a time."""
    # Imported in functions: these modules import half of torch.distributed, FSDP
    # included, and an import of this package should not take that time.
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    # DCP's own writer keeps every tensor in memory until the file is complete. The
    # format is simple: saved objects one after the other in a file, and a pickled table
    # of their places, made of DCP's own classes.
    out.mkdir()
    tree = nested_tree(source)
    leaves = list(_leaves(tree, ()))
    empty = [path for path, value in leaves if isinstance(value, dict)]
    # Only if needed: the key is visible to users of ``dcp.load``.
    if source.aliases or empty:
        notes = {"aliases": dict(source.aliases), "empty": empty}
        leaves.append(((NOTES,), json.dumps(notes)))
    metadata = Metadata({}, planner_data={}, storage_data={}, version="1.0.0")
    metadata.storage_meta = StorageMeta()
    with (out / DATA).open("wb") as file:
        for path, value in leaves:
            # DCP writes no entry for empty dictionaries. With such an entry, DCP's
            # loader would take the directory for a directory of an old version.
            if path not in empty:
                _write(file, metadata, path, value)
    with (out / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of the objects that DCP's planner saves separately.

    The planner descends into dicts, and into lists that contain tensors or dicts.
    """
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
    """Return whether the planner descends into a list."""
    return any(
        isinstance(each, Mapping | LazyTensor | Tensor)
        or (isinstance(each, list) and _has_parts(each))
        for each in values
    )


def _write(file: BinaryIO, metadata: Any, path: tuple[Any, ...], value: Any) -> None:
    """Append ``value`` to ``file``, and add the place to ``metadata``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    key = ".".join(map(str, path))
    value = value.whole() if isinstance(value, LazyTensor) else value
    begin, offset = file.tell(), None
    torch.save(value, file)
    if isinstance(value, Tensor):
        # The whole tensor is a single chunk at the origin.
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
