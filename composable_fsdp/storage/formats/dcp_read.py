"""Reads directories of torch.distributed.checkpoint (DCP) without DCP's loader.

DCP's loader runs the pickles in the directory. Here, ``dcp_metadata.py`` reads
``.metadata``, and torch's restricted reader reads each saved object: a small
``torch.save`` archive somewhere in a ``.distcp`` file. Slices are assembled from boxes
of any form:

::

    interval [3, 17) of (4, 5)     ->  boxes of rows         (planning/boxes.py)
    each box  x  each saved chunk  ->  the common part is copied
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.formats.dcp_metadata import (
    Item,
    PathOf,
    SavedKey,
    read_metadata,
)
from composable_fsdp.storage.formats.nested import NestedSource
from composable_fsdp.storage.formats.torch_read import (
    lazy_tensors,
    refusal,
    require_uncompressed,
)
from composable_fsdp.storage.source import LazyTensor

NOTES = "composable_fsdp.notes"
"""The key of additional facts that our converter saves, as JSON text.

``aliases`` maps names of tied parameters to the name that each is tied to. ``empty``
lists the paths of empty dictionaries, for which DCP has no entry.
"""


def open_dcp(directory: Path) -> NestedSource:
    """Open a directory that torch.distributed.checkpoint wrote."""
    reader = _Items()
    entries = read_metadata(directory)
    tree: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    empty: list[PathOf] = []
    for key, entry in entries.items():
        value = _value(reader, key, entry)
        # Our converter's notes are no value of the user.
        if key == NOTES:
            aliases, empty = _read_notes(directory, value)
        else:
            _place(directory, tree, entry.path, value, longest=len(entries))
    # After all other values, because an empty dictionary may be an item of a list.
    for path in empty:
        _place(directory, tree, path, {}, longest=len(entries) + len(empty))
    return NestedSource(str(directory), tree, aliases)


def _value(reader: _Items, key: str, entry: SavedKey) -> Any:
    """Return the value of a key: a ``LazyTensor``, or the object that is no tensor."""
    if entry.info is not None:

        def read(start: int, stop: int) -> Tensor:
            return _read_interval(reader, key, entry, start, stop)

        # Without ``storage``: DCP stores a tensor per key and does not tell tied keys.
        return LazyTensor(entry.info, read)
    assert entry.item is not None
    value = reader.load(key, entry.item)
    return lazy_tensors(value, f"{entry.item.file}, {key!r}", entry.item.length)


class _Items:
    """Reads saved objects, and keeps the last object."""

    def __init__(self) -> None:
        # A large chunk is requested in many slices, one after the other: without the
        # cache, each slice would read the whole chunk.
        self._item: Item | None = None
        self._value: Any = None

    def load(self, key: str, item: Item) -> Any:
        """Return the object of ``item``, read by torch's restricted reader."""
        if item == self._item:
            return self._value
        self._item = self._value = None  # Free the last object first.
        try:
            with item.file.open("rb") as file:
                file.seek(item.offset)
                data = io.BytesIO(file.read(item.length))
            # torch's reader does not compare the checksums of the archive.
            _require_checksums(data)
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


def _require_checksums(data: io.BytesIO) -> None:
    """Raise if a record of the archive does not match the checksum."""
    if zipfile.is_zipfile(data):
        require_uncompressed(data)
        record = zipfile.ZipFile(data).testzip()
        if record is not None:
            raise zipfile.BadZipFile(f"the record {record!r} has another checksum")
    # For ``torch.load``, which reads from the current position.
    data.seek(0)


def _read_interval(
    reader: _Items, key: str, entry: SavedKey, start: int, stop: int
) -> Tensor:
    """Return elements ``[start, stop)`` of the flattened tensor."""
    assert entry.info is not None
    result = torch.empty(stop - start, dtype=entry.info.dtype, device="cpu")
    # An interval of a flattened tensor is a few boxes: a part of a row, whole rows, a
    # part of a row, and so on for each dimension.
    for box in interval_boxes(entry.info.shape, start, stop):
        # A view: the copies below write into ``result``.
        target = result[box.start : box.stop].view(box.sizes)
        for chunk in entry.chunks:
            common = _common(box.offsets, box.sizes, chunk.offsets, chunk.sizes)
            if common is None:
                continue
            saved = reader.load(key, chunk.item)
            # The metadata was checked without reading the objects.
            if (
                not isinstance(saved, Tensor)
                or tuple(saved.shape) != chunk.sizes
                or saved.dtype != entry.info.dtype
            ):
                raise CheckpointError(
                    f"{chunk.item.file} holds something else than a {chunk.sizes} "
                    f"tensor of {entry.info.dtype} where {key!r} at {chunk.offsets} "
                    "should be. The checkpoint is damaged; take another one."
                )
            target[_within(common, box.offsets)] = saved[_within(common, chunk.offsets)]
    return result


Span = tuple[int, int]


def _common(
    offsets: Sequence[int],
    sizes: Sequence[int],
    other_offsets: Sequence[int],
    other_sizes: Sequence[int],
) -> list[Span] | None:
    """Return the intersection of two boxes as (begin, end) per dimension, or None."""
    spans = [
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    ]
    return spans if all(begin < end for begin, end in spans) else None


def _within(spans: Sequence[Span], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of ``spans`` in a box that begins at ``offsets``."""
    return tuple(
        slice(begin - offset, end - offset)
        for (begin, end), offset in zip(spans, offsets, strict=True)
    )


def _place(
    directory: Path, tree: dict[str, Any], path: PathOf, value: Any, *, longest: int
) -> None:
    """Put ``value`` at ``path`` in nested dicts and lists (a number is an index)."""
    at: Any = tree
    if not path:
        raise CheckpointError(
            f"{directory} puts a value at no place. The checkpoint is damaged."
        )
    for part, following in zip(path, (*path[1:], None), strict=True):
        here = value
        if following is not None:
            here = [] if isinstance(following, int) else {}
        # ``longest`` bounds the list: a damaged index must not allocate a list of any
        # length.
        if isinstance(part, int) and isinstance(at, list) and 0 <= part < longest:
            # Keys come in any order, so a list may have unfilled items (None) for a
            # while.
            at.extend([None] * (part + 1 - len(at)))
            if at[part] is None:
                at[part] = here
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
    # Deeply nested JSON exhausts the stack.
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{directory}: {NOTES!r} expected JSON with 'aliases' and 'empty'; got "
            f"{repr(value)[:200]}. The checkpoint is damaged."
        ) from error
