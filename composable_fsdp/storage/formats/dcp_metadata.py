"""Reads the ``.metadata`` pickle of torch.distributed.checkpoint (DCP) as plain data.

Unpickling calls the functions that a pickle names. In this file, each name that a DCP
directory needs is replaced by a stand-in that only keeps the arguments, and any other
name is refused. So a file can call no function of torch, of the standard library or of
the user's code. The unpickled values are then validated. The names are those that torch
2.13 writes (checked there).

torch's own classes are not used, although their constructors are harmless: a pickle can
set attributes on a class, which would change DCP for the whole process, and the hash of
a ``MetadataIndex`` of nested tuples takes forever.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import (
    inner_file,
    read_document,
    require_document,
)
from composable_fsdp.storage.formats.torch_read import refusal
from composable_fsdp.storage.manifest import LARGEST
from composable_fsdp.storage.source import TensorInfo

METADATA = ".metadata"
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
PathOf = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """The place of a saved object: ``length`` bytes at byte ``offset`` of a file."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the place of the box's values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class SavedKey:
    """A key of the checkpoint: a tensor in chunks, or an object (``info`` is None)."""

    path: PathOf
    info: TensorInfo | None
    chunks: tuple[Chunk, ...]
    item: Item | None


class _Kept:
    """A stand-in for a class of DCP: keeps the state that the pickle sets."""

    kind = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        """Accept and ignore arguments, which a pickle passes to enums."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def get(self, name: str) -> Any:
        """Return a field of the state; None if there is no such field."""
        return self.state.get(name) if isinstance(self.state, dict) else None


_DCP = "torch.distributed.checkpoint"
_KEPT = {
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        "TensorProperties",
    },
}
# The path that the checkpoint was saved to: a str, or any of these classes.
_PATHS = {"Path", "PosixPath", "WindowsPath"}
_IGNORED = {
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


# Those that DCP's metadata needs, in any protocol. Others hash any value (sets, DICT),
# allocate what they claim (BYTEARRAY8) or call in other ways.
_ALLOWED = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET"),
    *("LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
    *("BINUNICODE", "SHORT_BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
)
_OPCODES: dict[int, Any] = pickle._Unpickler.dispatch


class _Reader(pickle._Unpickler):
    """An unpickler that knows only the names of DCP's metadata."""

    stack: list[Any]

    # The base class is the unpickler written in Python. The unpickler in C fills 32 GiB
    # of memory for a few bytes of pickle that memoize a value under the number 2 ** 31.
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises: UnpicklingError, for other names."""
        if name in _KEPT.get(module, ()):
            # A new class for each use: the pickle may set attributes on the class.
            return type(name, (_Kept,), {"kind": name})
        if name in _IGNORED.get(module, ()):
            return lambda *parts: None
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of DCP's metadata")

    def _set_item(self) -> None:
        """Add an item to a dict. Raises: UnpicklingError, for a key of another type."""
        self._require_keys(self.stack[-2:-1])
        _OPCODES[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        """Add items to a dict. Raises: UnpicklingError, for a key of another type."""
        self._require_keys(self.stack[::2])
        _OPCODES[pickle.SETITEMS[0]](self)

    def _require_keys(self, keys: list[Any]) -> None:
        """Refuse keys that DCP does not use."""
        # The hash of nested tuples that share their halves takes forever.
        for key in keys:
            if not isinstance(key, str | _Kept):
                raise pickle.UnpicklingError(
                    f"a {type(key).__name__} is no key of DCP's metadata"
                )

    # The functions by opcode; an opcode without one ends the reading.
    dispatch: ClassVar[dict[int, Any]] = {
        **{code: _OPCODES[code] for name in _ALLOWED for code in getattr(pickle, name)},
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def read_metadata(directory: Path) -> dict[str, SavedKey]:
    """Return the validated keys of the checkpoint in ``directory``."""
    file = inner_file(directory, METADATA)
    data = read_document(str(file))
    try:
        # From memory: a read of a file allocates as many bytes as the pickle claims.
        metadata = _Reader(io.BytesIO(data)).load()
    except Exception as error:  # A damaged pickle raises many kinds of errors.
        raise refusal(file, error) from error
    try:
        return dict(_entries(directory, metadata))
    except CheckpointError:
        raise
    except Exception as error:  # Values of unexpected types do, too.
        raise CheckpointError(
            f"{file} is damaged: {error}. Copy the checkpoint again, with all its "
            "files."
        ) from error


class _Malformed(Exception):
    """The metadata does not have the form that DCP writes."""


def _entries(directory: Path, metadata: Any) -> Iterator[tuple[str, SavedKey]]:
    """Yield the validated keys of the metadata."""
    kept = _kept(metadata, "Metadata")
    keys = _a(dict, kept.get("state_dict_metadata"))
    paths = kept.get("planner_data")
    items = _items(directory, _a(dict, kept.get("storage_data")))
    for key, about in keys.items():
        # The path in the nested state dict; a flat state dict has no paths.
        path = paths.get(key, (key,)) if isinstance(paths, dict) else (key,)
        if not isinstance(about, _Kept) or not isinstance(key, str):
            raise _Malformed(f"{_short(key)} is of no known kind")
        for part in _a(tuple, path):
            if not isinstance(part, str | int):
                raise _Malformed(f"{key!r} lies at {_short(path)}")
        if about.kind == "BytesStorageMetadata":
            item = items.get((key, None))
            if item is None:
                raise _Malformed(f"no file holds {key!r}")
            require_document(f"{item.file}, {key!r},", item.length)
            yield key, SavedKey(path, None, (), item)
        else:
            info = _info(_kept(about, "TensorStorageMetadata"))
            chunks = tuple(_chunks(key, about, items, info))
            require_cover(directory, key, info, chunks)
            yield key, SavedKey(path, info, chunks, None)


def _info(about: _Kept) -> TensorInfo:
    """Return dtype and shape of a tensor."""
    # DCP pickles the properties as a tuple that begins with the dtype.
    properties = _kept(about.get("properties"), "TensorProperties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise _Malformed(f"the dtype of a tensor is {_short(dtype)}")
    return TensorInfo(dtype, _sizes(about.get("size")))


def _chunks(
    key: str, about: _Kept, items: dict[tuple[str, Any], Item], info: TensorInfo
) -> Iterator[Chunk]:
    """Yield the chunks of a tensor, each with the place of its values."""
    for each in _a(list, about.get("chunks")):
        chunk = _kept(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if not len(offsets) == len(sizes) == len(info.shape):
            raise _Malformed(f"a box of {key!r} has another number of dims than it")
        item = items.get((key, offsets))
        if item is None:
            raise _Malformed(f"no file holds {key!r} at {offsets}")
        # Before memory is allocated by the sizes that the metadata claims.
        if TensorInfo(info.dtype, sizes).nbytes > item.length:
            raise _Malformed(
                f"a box of {key!r} is of {sizes}, its {item.length} bytes hold less"
            )
        # DCP writes each box as an archive of its own, which is read whole.
        require_document(
            f"{item.file}, {key!r},",
            item.length - TensorInfo(info.dtype, sizes).nbytes,
        )
        yield Chunk(offsets, sizes, item)


def _items(directory: Path, storage: dict[Any, Any]) -> dict[tuple[str, Any], Item]:
    """Return the place of each saved object, by key and box offsets or None."""
    files: dict[str, tuple[Path, int]] = {}
    items: dict[tuple[str, Any], Item] = {}
    for index, about in storage.items():
        place, info = _kept(index, "MetadataIndex"), _kept(about, "_StorageInfo")
        name, fqn = info.get("relative_path"), place.get("fqn")
        start, length = info.get("offset"), info.get("length")
        # Extensions such as compression: the bytes in the file are not the saved
        # object.
        if info.get("transform_descriptors"):
            raise _Malformed(
                f"{_short(fqn)} was written through "
                f"{_short(info.get('transform_descriptors'))}, which only the program "
                "that wrote it can undo"
            )
        if not isinstance(name, str) or not isinstance(fqn, str):
            raise _Malformed(f"{_short(fqn)} lies in the file {_short(name)}")
        # ``inner_file`` refuses paths outside the directory; resolve each file only
        # once.
        if name not in files:
            path = inner_file(directory, name)
            files[name] = (path, path.stat().st_size)
        path, size = files[name]
        # The file's values come from the pickle, so check their types before the sum.
        _sizes((start, length))
        if start + length > size:
            raise CheckpointError(
                f"{path} has {size} bytes; expected {start + length}, with the values "
                f"of {fqn!r}. Copy the checkpoint again."
            )
        offset = place.get("offset")
        items[fqn, None if offset is None else _sizes(offset)] = Item(
            path, start, length
        )
    return items


def require_cover(
    directory: Path, key: str, info: TensorInfo, chunks: tuple[Chunk, ...]
) -> None:
    """Raise if chunks leave elements out, overlap, or reach beyond the tensor."""
    # A gap would leave elements of ``torch.empty`` unfilled, without an error.
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    held = 0
    for chunk in filled:
        held += TensorInfo(info.dtype, chunk.sizes).numel
        ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > size for end, size in zip(ends, info.shape, strict=True)):
            raise _Malformed(f"a box of {key!r} reaches beyond its shape {info.shape}")
    overlap = _overlap(filled, len(info.shape))
    # Boxes inside the shape, without overlaps and with the right number of elements,
    # cover every element.
    if held != info.numel or overlap:
        raise CheckpointError(
            f"{directory}: {key!r} has {info.numel} elements, its boxes hold {held}"
            f"{f' and overlap at {overlap.offsets}' if overlap else ''}. The "
            "checkpoint is incomplete; take another one."
        )


def _overlap(chunks: list[Chunk], dims: int) -> Chunk | None:
    """Return a chunk that shares elements with another chunk, or None."""
    if dims == 0:
        return chunks[1] if len(chunks) > 1 else None
    # Sweep along the dimension with the most cuts: few boxes overlap there, so there
    # are few pairs to compare.
    cut = max(range(dims), key=lambda dim: len({c.offsets[dim] for c in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[cut]):
        begin = chunk.offsets[cut]
        active = [c for c in active if c.offsets[cut] + c.sizes[cut] > begin]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(
                    chunk.offsets,
                    chunk.sizes,
                    other.offsets,
                    other.sizes,
                    strict=True,
                )
            ):
                return chunk
        active.append(chunk)
    return None


def _kept(value: Any, kind: str) -> _Kept:
    """Return ``value``, a stand-in for the class ``kind``; raise for other types."""
    if not isinstance(value, _Kept) or value.kind != kind:
        raise _Malformed(f"it has a {type(value).__name__} in place of a {kind}")
    return value


def _a(kind: type, value: Any) -> Any:
    """Return ``value`` of type ``kind``; raise for other types."""
    if not isinstance(value, kind):
        raise _Malformed(
            f"it has a {type(value).__name__} in place of a {kind.__name__}"
        )
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Return ``value``, a tuple of sizes or offsets; raise for other types."""
    if not isinstance(value, tuple) or not all(
        type(size) is int and 0 <= size <= LARGEST for size in value
    ):
        raise _Malformed(f"{_short(value)} stands in place of sizes")
    return value


def _short(value: Any) -> str:
    """Return a shortened ``repr``."""
    # A few bytes of pickle can stand for endlessly nested tuples, so a full ``repr``
    # might never end.
    try:
        return _SHORT.repr(value)
    except ValueError:  # An integer with more digits than Python prints.
        return f"a {type(value).__name__}"
