"""Writes checkpoints of other formats, and native ones, from any source."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.codec import require_storable, to_json
from composable_fsdp.storage.directory import MANIFEST, write_synced
from composable_fsdp.storage.formats.dcp_read import METADATA, NOTES
from composable_fsdp.storage.formats.nested import nested_tree
from composable_fsdp.storage.manifest import Manifest, Span
from composable_fsdp.storage.merge import Draft, TensorPart, merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.source import LazyTensor, Source, TensorInfo
from composable_fsdp.storage.validate import parse
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece, in_order, places_of, write_file

DATA = "rank00000.safetensors"


def write_native(out: Path, source: Source) -> None:
    """Make the directory ``out``."""
    out.mkdir()
    try:
        maker = _Maker(source)
    except TypeError as error:
        # ``encode`` speaks of saving; add the way out for a conversion.
        raise CheckpointError(
            f"{error} Convert with --weights-only, or to another format."
        ) from error
    entries = in_order(maker.pieces)
    # The file lists entries of large elements first, so all entries are aligned.
    file = write_file(str(out / DATA), entries)
    manifest: Manifest = merge([(maker.part, file, places_of(entries))])
    # The source's random states are not converted.
    manifest = dataclasses.replace(manifest, rng=())
    parse(to_json(manifest), str(out / MANIFEST))  # A load must accept the file.
    write_synced(str(out / MANIFEST), manifest_bytes(manifest))


class _Maker(Draft):
    """Collects the entries of the file and their description."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        part = self.part
        # First name -> other names of a tied parameter.
        others: dict[str, list[str]] = {}
        for name, kept in source.aliases.items():
            others.setdefault(kept, []).append(name)
        for i, (name, info) in enumerate(source.model.items()):
            # Under the first name, with the other names of a tied parameter.
            names = name, *others.get(name, ())
            span = Span(0, info.numel)
            tensor = TensorPart(names, info.dtype, info.shape, span, i)
            self._add(tensor.key(), info, partial(source.read_model, name))
            values = dict(source.optim_values.get(name, {}))
            for key, state in source.optim.get(name, {}).items():
                read = partial(source.read_optim, name, key)
                if state.shape == info.shape:
                    tensor.states[key] = state.dtype
                    self._add(tensor.key(key), state, read)
                else:
                    values[key] = read(0, state.numel).view(state.shape)
            tensor.values = {k: self.value(k, v, name) for k, v in values.items()}
            part.tensors.append(tensor)
        part.wrappers = dict(source.wrappers)
        for name, value in source.own_states.items():
            state = encode(value, name, self.put, python_values=True)
            part.own_states[name] = state
        if source.param_groups is not None:
            part.group_numbers = list(range(len(source.param_groups)))
            part.param_groups = [
                encode(dict(group), f"param_groups[{g}]", self.put, python_values=True)
                for g, group in enumerate(source.param_groups)
            ]
        part.extra = encode(source.extra, "extra", self.put)

    def _add(
        self, key: str, info: TensorInfo, read: Callable[[int, int], Tensor]
    ) -> None:
        """Add the entry of a tensor; ``read`` returns elements ``[start, stop)``."""
        require_storable(info.dtype, repr(key))

        def pieces() -> Iterator[Tensor]:
            return (read(start, stop) for start, stop in info.slices())

        self.pieces.append(Piece(key, info.dtype, info.shape, pieces))


def write_torch(out: Path, source: Source) -> None:
    """Make the file ``out``; ``torch.save`` takes all tensors in host memory."""
    torch.save(_whole(nested_tree(source), {}), out)


def _whole(value: Any, read: dict[Hashable, Tensor]) -> Any:
    """Return ``value`` with tensors read; tied names share one, which is saved once."""
    if isinstance(value, LazyTensor):
        if value.storage not in read:
            read[value.storage] = value.whole()
        return read[value.storage]
    if isinstance(value, dict):
        return {key: _whole(each, read) for key, each in value.items()}
    return [_whole(each, read) for each in value] if isinstance(value, list) else value


DCP_DATA = "__0_0.distcp"


def write_dcp(out: Path, source: Source) -> None:
    """Make the directory ``out``. Memory holds a single tensor at a time."""
    # Imported in functions: these modules import half of torch.distributed.
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    # DCP's own writer keeps every tensor in memory until the file is complete.
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
    with (out / DCP_DATA).open("wb") as file:
        for path, value in leaves:
            # For such an entry, DCP's loader would take this for an old version.
            if path not in empty:
                _write(file, metadata, path, value)
    with (out / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of the objects that DCP's planner saves separately."""
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
    place = _StorageInfo(DCP_DATA, begin, file.tell() - begin)
    metadata.storage_data[MetadataIndex(key, offset)] = place
