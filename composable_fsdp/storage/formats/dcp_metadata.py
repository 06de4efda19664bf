"""The ``.metadata`` pickle of torch.distributed.checkpoint, read as the data it is.

Unpickling calls what the pickle names. Here every name that a DCP directory needs is
answered by a stand-in that only keeps its arguments, and any other name is refused, so
nothing of torch, of the standard library or of the user's code is called by a file.
What comes out is checked again before it is believed. The names are those that torch
2.13 writes, checked there, and two that the first versions of DCP wrote.
"""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.formats.files import inner_file
from composable_fsdp.storage.formats.torch_read import refusal
from composable_fsdp.storage.parse import LARGEST
from composable_fsdp.storage.source import TensorInfo

METADATA = ".metadata"
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
PathOf = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Where one saved object lies: ``length`` bytes at ``offset`` of a file."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its values lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the checkpoint: a tensor in chunks, or (``info`` None) an object."""

    path: PathOf
    info: TensorInfo | None
    chunks: tuple[Chunk, ...]
    item: Item | None


class _Kept:
    """Stands in for a class of DCP: keeps the state that the pickle gives it."""

    kind = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        """Enums are made with an argument, which does not matter here."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


def _text(*parts: Any) -> str:
    return "/".join(map(str, parts))


_DCP = "torch.distributed.checkpoint"
_KEPT = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    # Where two of them were in the first versions of DCP.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch.serialization", "_get_layout"): _text,
    # The path that it was saved to, a str or any of these.
    ("pathlib", "Path"): _text,
    ("pathlib", "PosixPath"): _text,
    ("pathlib", "WindowsPath"): _text,
    ("pathlib._local", "Path"): _text,
    ("pathlib._local", "PosixPath"): _text,
    ("pathlib._local", "WindowsPath"): _text,
}


class _Reader(pickle._Unpickler):
    """The reader in Python: for one in C, a few bytes that number a value by 2 ** 31
    fill 32 GiB of memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KEPT:
            return type(name, (_Kept,), {"kind": name})
        if (module, name) in _CALLS:
            return _CALLS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of DCP's metadata")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("DCP's metadata has no persistent ids")


def read_metadata(directory: Path) -> dict[str, Entry]:
    """The keys of the checkpoint in ``directory``, checked.

    Every file named lies in the directory and is long enough, and every tensor is
    covered by its chunks, each element once.

    Raises: CheckpointError, naming the file and the key.
    """
    file = inner_file(directory, METADATA)
    try:
        with file.open("rb") as stream:
            metadata = _Reader(stream).load()
    except Exception as error:  # a damaged pickle raises all kinds
        raise refusal(file, error) from error
    try:
        return dict(_entries(directory, metadata))
    except CheckpointError:
        raise
    except Exception as error:  # so do values that are of other kinds
        raise CheckpointError(
            f"{file} is damaged: {error}. Copy the checkpoint again, with all its "
            "files."
        ) from error


class _Malformed(Exception):
    """The metadata is not of the form that DCP gives it."""


def _entries(directory: Path, metadata: Any) -> Iterator[tuple[str, Entry]]:
    kept = _kept(metadata, "Metadata")
    keys = _a(dict, kept.get("state_dict_metadata"))
    paths = kept.get("planner_data")
    items = _items(directory, _a(dict, kept.get("storage_data")))
    for key, about in keys.items():
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
            yield key, Entry(path, None, (), item)
        else:
            info = _info(_kept(about, "TensorStorageMetadata"))
            chunks = tuple(_chunks(key, about, items, len(info.shape)))
            require_cover(directory, key, info, chunks)
            yield key, Entry(path, info, chunks, None)


def _info(about: _Kept) -> TensorInfo:
    properties = _kept(about.get("properties"), "TensorProperties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise _Malformed(f"the dtype of a tensor is {dtype!r}")
    return TensorInfo(dtype, _sizes(about.get("size")))


def _chunks(
    key: str, about: _Kept, items: dict[tuple[str, Any], Item], dims: int
) -> Iterator[Chunk]:
    for each in _a(list, about.get("chunks")):
        chunk = _kept(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if len(offsets) != dims or len(sizes) != dims:
            raise _Malformed(f"a box of {key!r} has another number of dims than it")
        item = items.get((key, offsets))
        if item is None:
            raise _Malformed(f"no file holds {key!r} at {offsets}")
        yield Chunk(offsets, sizes, item)


def _items(directory: Path, storage: dict[Any, Any]) -> dict[tuple[str, Any], Item]:
    files: dict[str, tuple[Path, int]] = {}
    items: dict[tuple[str, Any], Item] = {}
    for index, about in storage.items():
        place, info = _kept(index, "MetadataIndex"), _kept(about, "_StorageInfo")
        name, fqn = info.get("relative_path"), place.get("fqn")
        start, length = info.get("offset"), info.get("length")
        if info.get("transform_descriptors"):
            raise _Malformed(
                f"{_short(fqn)} was written through "
                f"{_short(info.get('transform_descriptors'))}, which only the program "
                "that wrote it can undo"
            )
        if not isinstance(name, str) or not isinstance(fqn, str):
            raise _Malformed(f"{_short(fqn)} lies in the file {_short(name)}")
        if name not in files:
            path = inner_file(directory, name)
            files[name] = (path, path.stat().st_size)
        path, size = files[name]
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
    """Refuse chunks that leave elements out, overlap, or lie outside the tensor.

    A gap would be filled by what memory held before, without an error.

    Raises: CheckpointError, naming the tensor.
    """
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    held = 0
    for chunk in filled:
        held += TensorInfo(info.dtype, chunk.sizes).numel
        ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > size for end, size in zip(ends, info.shape, strict=True)):
            raise _Malformed(f"a box of {key!r} reaches beyond its shape {info.shape}")
    overlap = _overlap(filled, len(info.shape))
    if held != info.numel or overlap:
        raise CheckpointError(
            f"{directory}: {key!r} has {info.numel} elements, its boxes hold {held}"
            f"{f' and overlap at {overlap.offsets}' if overlap else ''}. The "
            "checkpoint is incomplete; take another one."
        )


def _overlap(chunks: list[Chunk], dims: int) -> Chunk | None:
    """A chunk that shares elements with another one."""
    if dims == 0:
        return chunks[1] if len(chunks) > 1 else None
    # Along the dim that was cut most, boxes rarely meet: few pairs to look at.
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
    if not isinstance(value, _Kept) or value.kind != kind:
        raise _Malformed(f"it has a {type(value).__name__} in place of a {kind}")
    return value


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _Malformed(
            f"it has a {type(value).__name__} in place of a {kind.__name__}"
        )
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(
        type(size) is int and 0 <= size <= LARGEST for size in value
    ):
        raise _Malformed(f"{_short(value)} stands in place of sizes")
    return value


def _short(value: Any) -> str:
    """``repr``, cut off: a few bytes of pickle can stand for endless nested tuples."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"a {type(value).__name__}"
