"""Writes a native checkpoint directory of a single file, from any source.

Every tensor is stored whole, as ``save`` stores tensors in no unit. A rank that loads
the checkpoint reads only the slices of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import MANIFEST, write_synced
from composable_fsdp.storage.file_part import FilePart, SinglePart
from composable_fsdp.storage.manifest import Manifest, require_storable
from composable_fsdp.storage.merge import merge
from composable_fsdp.storage.native import manifest_bytes
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.storage.validate import parse
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import (
    Piece,
    in_order,
    of_tensor,
    places_of,
    write_file,
)

DATA = "rank00000.safetensors"


def write_native(out: Path, source: Source) -> None:
    """Make the directory ``out``. Memory holds a single piece of a tensor at a time.

    Random states are not written: a rank that loads the checkpoint keeps the current
    states.

    Raises: CheckpointError, for extra state of other types than JSON and tensors.
    """
    out.mkdir()
    maker = _Maker(source)
    try:
        part = maker.part()
    except TypeError as error:
        # ``encode`` speaks of saving; add the way out for a conversion.
        raise CheckpointError(
            f"{error} Convert with --weights-only, or to another format."
        ) from error
    entries = in_order(maker.pieces)
    # The file lists entries of large elements first, so all entries are aligned.
    file = write_file(str(out / DATA), entries)
    manifest: Manifest = merge([(part, file, places_of(entries))])
    # ``merge`` lists a random state per rank, but the source's states are not
    # converted.
    manifest = dataclasses.replace(manifest, rng=())
    parse(manifest.to_json(), str(out / MANIFEST))  # A load must accept the file.
    write_synced(str(out / MANIFEST), manifest_bytes(manifest))


class _Maker:
    """Collects the entries of the file and their description."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.pieces: list[Piece] = []
        self._part = FilePart()

    def part(self) -> FilePart:
        """Return the description. Raises: TypeError, for a value that is not JSON."""
        source, part = self.source, self._part
        # First name -> other names of a tied parameter.
        others: dict[str, list[str]] = {}
        for name, kept in source.aliases.items():
            others.setdefault(kept, []).append(name)
        for name, info in source.model.items():
            # Under the first name, with the other names of a tied parameter.
            single = SinglePart((name, *others.get(name, ())), f"tensor.{name}")
            self._add(single.key, info, partial(source.read_model, name))
            for key, state in source.optim.get(name, {}).items():
                single.states[key] = f"{single.key}.{key}"
                read = partial(source.read_optim, name, key)
                self._add(single.states[key], state, read)
            for key, value in source.optim_values.get(name, {}).items():
                where = f"optimizer state {key!r} of {name!r}"
                single.values[key] = self._encode(value, where)
            part.singles.append(single)
        part.wrappers = dict(source.wrappers)
        for name, value in source.own_states.items():
            part.own_states[name] = self._encode(value, name)
        if source.param_groups is not None:
            part.group_numbers = list(range(len(source.param_groups)))
            part.param_groups = [
                self._encode(dict(group), f"param_groups[{g}]")
                for g, group in enumerate(source.param_groups)
            ]
        part.extra = encode(source.extra, "extra", self._put)
        for piece in self.pieces:
            part.tensors[piece.key] = (piece.dtype, piece.shape)
        return part

    def _add(
        self, key: str, info: TensorInfo, read: Callable[[int, int], Tensor]
    ) -> None:
        """Add the entry of a tensor; ``read`` returns elements ``[start, stop)``."""
        require_storable(info.dtype, repr(key))

        def pieces() -> Iterator[Tensor]:
            return (read(start, stop) for start, stop in info.slices())

        self.pieces.append(Piece(key, info.dtype, info.shape, pieces))

    def _encode(self, value: Any, where: str) -> Any:
        """Encode a value of the optimizer or of a module."""
        return encode(value, where, self._put, python_values=True)

    def _put(self, tensor: Tensor, where: str) -> int:
        """Add a loose tensor and return the index, for ``encode``."""
        require_storable(tensor.dtype, where)
        key = f"loose.{len(self._part.loose)}"
        self._part.loose.append(key)
        self.pieces.append(of_tensor(key, tensor))
        return len(self._part.loose) - 1
