"""Reads directories of torch.distributed.checkpoint (DCP), of any placements.

DCP's own loader would run the pickles in the directory, and reads a whole box for each
slice of it (1 GB in 64 slices: 17.0 s, here 3.5 s).
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import (
    inner_file,
    read_document,
    require_document,
)
from composable_fsdp.storage.formats.files import lazy_tensors, refusal, require_stored
from composable_fsdp.storage.formats.nested import NestedSource
from composable_fsdp.storage.manifest import LARGEST, Span, excerpt
from composable_fsdp.storage.source import LazyTensor, TensorInfo

METADATA = ".metadata"
NOTES = "composable_fsdp.notes"
"""The key of what our converter saves beside, as JSON: ties and empty dictionaries."""
PathOf = tuple[str | int, ...]


class _Item(NamedTuple):
    """The place of a saved object: ``length`` bytes at byte ``offset`` of a file."""

    file: Path
    offset: int
    length: int


class _Chunk(NamedTuple):
    """A box of a tensor, and the place of the box's values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: _Item

    def common(self, offsets: Sequence[int], sizes: Sequence[int]) -> _Common | None:
        """Return the slices of what a box shares, in that box and in this; or None."""
        pairs = list(zip(offsets, sizes, self.offsets, self.sizes, strict=True))
        spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in pairs]
        if any(begin >= end for begin, end in spans):
            return None
        both = [
            tuple(slice(b - at, e - at) for (b, e), at in zip(spans, own, strict=True))
            for own in (offsets, self.offsets)
        ]
        return both[0], both[1]


_Common = tuple[tuple[slice, ...], tuple[slice, ...]]
_UNREAD = frozenset(
    ("_MEM_FORMAT_ENCODING", "_get_layout", "Path", "PosixPath", "WindowsPath")
)


class _Unpickler(pickle._Unpickler):
    """Knows the names of DCP's metadata and no others."""

    # Python's own: the one in C makes a table as long as the largest number in a
    # pickle. Without the opcode that allocates as many bytes as a pickle claims.
    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of a name. Raises: UnpicklingError."""
        # Imported in functions: these modules import half of torch.distributed.
        from torch.distributed.checkpoint import filesystem, metadata

        dcp = "torch.distributed.checkpoint"
        # Subclasses, because a pickle may set attributes on the classes that it names.
        if module == f"{dcp}.metadata" and name in metadata.__all__:
            own: dict[str, Any] = {}
            if name == "TensorProperties":
                # The first property; torch's own function reads its enum of formats.
                own["__setstate__"] = lambda made, state: setattr(
                    made, "dtype", state[0]
                )
            return type(name, (getattr(metadata, name),), own)
        if (module, name) == (f"{dcp}.filesystem", "_StorageInfo"):
            return type(name, (filesystem._StorageInfo,), {})
        # Facts that nobody reads: layouts, and the path that was saved to.
        if name in _UNREAD:
            return lambda *parts: None
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): torch.Size(sizes)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of DCP's metadata")


class _Malformed(Exception):
    """The metadata does not have the form that DCP writes."""


def open_dcp(directory: Path) -> NestedSource:
    """Open a directory that torch.distributed.checkpoint wrote."""
    file = inner_file(directory, METADATA)
    data = read_document(str(file))
    try:
        # From memory: a read of a file allocates as many bytes as the pickle claims.
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # A damaged pickle raises many kinds of errors.
        raise refusal(file, error) from error
    reader, tree = _Items(), dict[str, Any]()
    notes: Any = None
    try:
        found = list(_values(directory, reader, metadata))
    except CheckpointError:
        raise
    except Exception as error:  # Values of unexpected types do, too.
        raise CheckpointError(
            f"{file} is damaged: {error}. Copy the checkpoint again, with all its "
            "files."
        ) from error
    for key, path, value in found:
        if key == NOTES:
            notes = value
        else:
            _place(directory, tree, path, value, longest=len(found))
    aliases, empty = ({}, []) if notes is None else _read_notes(directory, notes)
    # After all other values, because an empty dictionary may be an item of a list.
    for path in empty:
        _place(directory, tree, path, {}, longest=len(found) + len(empty))
    return NestedSource(str(directory), tree, aliases)


def _values(
    directory: Path, reader: _Items, metadata: Any
) -> Iterator[tuple[str, PathOf, Any]]:
    """Yield key, path and value of each saved object; tensors are ``LazyTensor``."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    if not isinstance(metadata, Metadata):
        kind = type(metadata).__name__
        raise _Malformed(f"it has a {kind} in place of a Metadata")
    paths = metadata.planner_data
    items = _items(directory, metadata.storage_data)
    for key, about in metadata.state_dict_metadata.items():
        # The path in the nested state dict; a flat state dict has no paths.
        path = paths.get(key, (key,)) if isinstance(paths, dict) else (key,)
        told = (key, *path)
        if not isinstance(path, tuple) or not all(
            isinstance(part, str | int) for part in told
        ):
            raise _Malformed(f"{excerpt(key)} lies at {excerpt(path)}")
        if not isinstance(about, BytesStorageMetadata):
            yield key, path, _lazy(directory, reader, key, about, items)
            continue
        item = items[key, None]
        where = f"{item.file}, {key!r}"
        require_document(f"{where},", item.length)
        yield key, path, lazy_tensors(reader.load(key, item), where, item.length)


def _lazy(
    directory: Path,
    reader: _Items,
    key: str,
    about: Any,
    items: dict[tuple[str, Any], _Item],
) -> LazyTensor:
    """Return a tensor whose chunks cover every element exactly once."""
    info = TensorInfo(about.properties.dtype, _sizes(about.size))
    if not isinstance(info.dtype, torch.dtype):
        raise _Malformed(f"the dtype of {key!r} is {excerpt(info.dtype)}")
    chunks, held = list[_Chunk](), 0
    for each in about.chunks:
        offsets, sizes = _sizes(each.offsets), _sizes(each.sizes)
        item, box = items[key, offsets], TensorInfo(info.dtype, sizes)
        # Before memory is allocated by the sizes that the metadata claims.
        if box.nbytes > item.length:
            raise _Malformed(
                f"a box of {key!r} is of {sizes}, its {item.length} bytes hold less"
            )
        # DCP writes each box as an archive of its own, which is read whole.
        require_document(f"{item.file}, {key!r},", item.length - box.nbytes)
        spans = zip(offsets, sizes, info.shape, strict=True)
        if box.numel and any(at + n > size for at, n, size in spans):
            raise _Malformed(f"a box of {key!r} reaches beyond its shape {info.shape}")
        held += box.numel
        chunks.append(_Chunk(offsets, sizes, item))
    overlap = _overlap([c for c in chunks if 0 not in c.sizes], len(info.shape))
    # A gap would leave elements of ``torch.empty`` unfilled, without an error.
    if held != info.numel or overlap:
        raise CheckpointError(
            f"{directory}: {key!r} has {info.numel} elements, its boxes hold {held}"
            f"{f' and overlap at {overlap.offsets}' if overlap else ''}. The "
            "checkpoint is incomplete; take another one."
        )
    # Without ``storage``: DCP stores a tensor per key and does not tell tied keys.
    return LazyTensor(info, partial(_read_interval, reader, key, info, chunks))


def _items(directory: Path, storage: Any) -> dict[tuple[str, Any], _Item]:
    """Return the place of each saved object, by key and box offsets or None."""
    found: dict[tuple[str, Any], _Item] = {}
    files: dict[str, tuple[Path, int]] = {}
    for index, about in storage.items():
        name, fqn, begin = about.relative_path, index.fqn, about.offset
        # Extensions such as compression: the bytes are not the saved object.
        if about.transform_descriptors:
            raise _Malformed(
                f"{excerpt(fqn)} was written through "
                f"{excerpt(about.transform_descriptors)}, which only the program that "
                "wrote it can undo"
            )
        # Once per file: the names in a hostile directory lead elsewhere.
        if name not in files:
            path = inner_file(directory, name)
            files[name] = path, path.stat().st_size
        path, size = files[name]
        _sizes((begin, about.length))
        if begin + about.length > size:
            raise CheckpointError(
                f"{path} has {size} bytes; expected {begin + about.length}, with the "
                f"values of {excerpt(fqn)}. Copy the checkpoint again."
            )
        at = None if index.offset is None else _sizes(index.offset)
        found[fqn, at] = _Item(path, begin, about.length)
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    """Return ``value``, a tuple of sizes or offsets; raise for other types."""
    if not isinstance(value, tuple) or not all(
        type(size) is int and 0 <= size <= LARGEST for size in value
    ):
        raise _Malformed(f"{excerpt(value)} stands in place of sizes")
    return tuple(value)


def _overlap(chunks: list[_Chunk], dims: int) -> _Chunk | None:
    """Return a chunk that shares elements with another chunk, or None."""
    if dims == 0:
        return chunks[1] if len(chunks) > 1 else None
    # Along the dim with the most cuts, few boxes overlap: few pairs to compare.
    cut = max(range(dims), key=lambda dim: len({c.offsets[dim] for c in chunks}))
    active: list[_Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[cut]):
        begin = chunk.offsets[cut]
        active = [c for c in active if c.offsets[cut] + c.sizes[cut] > begin]
        if any(other.common(chunk.offsets, chunk.sizes) for other in active):
            return chunk
        active.append(chunk)
    return None


class _Items:
    """Reads saved objects, and keeps the last: a chunk is read in many slices."""

    def __init__(self) -> None:
        self._item: _Item | None = None
        self._value: Any = None

    def load(self, key: str, item: _Item) -> Any:
        """Return the object of ``item``, read by torch's restricted reader."""
        if item == self._item:
            return self._value
        self._item = self._value = None  # Free the last object first.
        try:
            with item.file.open("rb") as file:
                file.seek(item.offset)
                data = io.BytesIO(file.read(item.length))
            if zipfile.is_zipfile(data):
                require_stored(data, sums=True)
            data.seek(0)
            value = torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise refusal(f"{item.file}, {key!r},", error) from error
        except Exception as error:  # torch's reader raises many kinds of errors.
            raise CheckpointError(
                f"{item.file} is damaged where {key!r} should be: {error}. Copy the "
                "checkpoint again."
            ) from error
        self._item, self._value = item, value
        return value


def _read_interval(
    reader: _Items,
    key: str,
    info: TensorInfo,
    chunks: Sequence[_Chunk],
    start: int,
    stop: int,
) -> Tensor:
    """Return elements ``[start, stop)`` of the flattened tensor."""
    result = torch.empty(stop - start, dtype=info.dtype, device="cpu")
    # An interval is a few boxes; of each, the part in each chunk is copied.
    for box in Span(start, stop).boxes(info.shape):
        # A view: the copies below write into ``result``.
        target = result[box.start : box.stop].view(box.sizes)
        for chunk in chunks:
            common = chunk.common(box.offsets, box.sizes)
            if common is None:
                continue
            saved = reader.load(key, chunk.item)
            facts = getattr(saved, "shape", None), getattr(saved, "dtype", None)
            # The metadata was checked without reading the objects.
            if not isinstance(saved, Tensor) or facts != (chunk.sizes, info.dtype):
                raise CheckpointError(
                    f"{chunk.item.file} holds something else than a {chunk.sizes} "
                    f"tensor of {info.dtype} where {key!r} at {chunk.offsets} should "
                    "be. The checkpoint is damaged; take another one."
                )
            target[common[0]] = saved[common[1]]
    return result


def _place(
    directory: Path, tree: dict[str, Any], path: PathOf, value: Any, *, longest: int
) -> None:
    """Put ``value`` at ``path`` in nested dicts and lists (a number is an index)."""
    at: Any = tree
    for part, following in zip(path, (*path[1:], None), strict=True):
        here = value
        if following is not None:
            here = [] if isinstance(following, int) else {}
        # Keys come in any order; a damaged index must allocate no list of any length.
        if isinstance(part, int) and isinstance(at, list) and 0 <= part < longest:
            at.extend([None] * (part + 1 - len(at)))
            at[part] = here if at[part] is None else at[part]
        elif isinstance(part, str) and isinstance(at, dict):
            at.setdefault(part, here)
        else:
            raise CheckpointError(
                f"{directory} puts something at {path}, where there is no such place. "
                "The checkpoint is damaged."
            )
        at = at[part]


def _read_notes(directory: Path, value: Any) -> tuple[dict[str, str], list[PathOf]]:
    """Return the aliases and the paths of empty dictionaries."""
    try:
        notes = json.loads(value)
        aliases = {str(name): str(kept) for name, kept in notes["aliases"].items()}
        return aliases, [tuple(path) for path in notes["empty"]]
    except Exception as error:  # Deeply nested JSON exhausts the stack, too.
        raise CheckpointError(
            f"{directory}: {NOTES!r} expected JSON with 'aliases' and 'empty'; got "
            f"{repr(value)[:200]}. The checkpoint is damaged."
        ) from error
