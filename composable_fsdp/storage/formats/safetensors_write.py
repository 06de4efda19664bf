"""Writes safetensors files whose tensors arrive in any order and in pieces.

Names, shapes and dtypes are known at the start, so the place of every tensor in every
file is known, too. The headers are written first, and elements are written to their
places as they arrive. Memory holds only the current piece. A tensor may be cut in any
way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.formats.safetensors_read import INDEX, SINGLE
from composable_fsdp.storage.manifest import CODES, require_storable
from composable_fsdp.storage.source import TensorInfo
from composable_fsdp.storage.writer import bytes_of, header_bytes, in_host_memory


class SafetensorsWriter:
    """The files of a set of tensors while they are written.

    Call ``write`` for all elements of each tensor, then ``finish``.

    Raises: CheckpointError, for a dtype that safetensors does not have.
    """

    def __init__(
        self,
        out: Path,
        tensors: Mapping[str, TensorInfo],
        aliases: Mapping[str, str],
        *,
        max_shard_bytes: int,
        single: bool = False,
    ) -> None:
        for name, info in tensors.items():
            require_storable(info.dtype, repr(name))
        self._tensors = tensors
        self._files: list[BinaryIO] = []
        self._at: dict[str, tuple[BinaryIO, int]] = {}
        # Elements that have not been written yet, by name.
        self._left = {name: info.numel for name, info in tensors.items()}
        shards = [list(tensors)] if single else _shards(tensors, max_shard_bytes)
        if single:
            paths = [out]
        else:
            out.mkdir()
            paths = [out / file for file in _file_names(len(shards))]
        for path, names in zip(paths, shards, strict=True):
            self._begin(path, names, aliases)
        if len(paths) > 1:
            _write_index(out, paths, shards, tensors)

    def _begin(self, path: Path, names: list[str], aliases: Mapping[str, str]) -> None:
        """Write the header of a file, and compute the places of the tensors."""
        file = path.open("wb")
        self._files.append(file)
        # As ``safetensors.torch.save_model`` writes ties; readers ignore unknown
        # metadata.
        told = {name: kept for name, kept in aliases.items() if kept in names}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **told}}
        at, places = 0, {}
        # Largest elements first, so each tensor begins at a multiple of the element
        # size.
        for name in sorted(names, key=lambda n: -self._tensors[n].dtype.itemsize):
            places[name] = at
            at += self._tensors[name].nbytes
        # The header lists the tensors in the model's order; the places may differ.
        for name in names:
            info = self._tensors[name]
            header[name] = {
                "dtype": CODES[info.dtype],
                "shape": info.shape,
                "data_offsets": (places[name], places[name] + info.nbytes),
            }
        # The data begins at a multiple of the largest element size.
        text = header_bytes(header, 8)
        file.write(text)
        # The file has the final size from the start; elements are written in any order.
        file.truncate(len(text) + at)
        for name, place in places.items():
            self._at[name] = (file, len(text) + place)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write ``values`` of any shape at element ``start`` of tensor ``name``."""
        file, begin = self._at[name]
        file.seek(begin + start * values.dtype.itemsize)
        write_elements(file, values)
        # Counted, so ``finish`` can tell a tensor that is incomplete.
        self._left[name] -= values.numel()

    def finish(self) -> None:
        """Close the files. Raises: CheckpointError, for tensors that are incomplete."""
        self.close()
        short = [name for name, left in self._left.items() if left]
        if short:
            raise CheckpointError(f"Elements of {short[:8]} were not written.")

    def close(self) -> None:
        """Close the files, complete or not."""
        for file in self._files:
            file.close()


def write_elements(file: BinaryIO, values: Tensor) -> None:
    """Write the elements of ``values`` in row-major order."""
    host = in_host_memory(values)
    file.write(bytes_of(host))


def _shards(tensors: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Return the names per file, in order: up to ``limit`` bytes or a single tensor."""
    # The format cannot divide a tensor between files. The rule is huggingface_hub's, so
    # that both write the same files: a tensor above the limit has a file of its own,
    # before the file that is being filled.
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, info in tensors.items():
        if info.nbytes > limit:
            shards.append([name])
            continue
        if used + info.nbytes > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += info.nbytes
    # A model without tensors still has a file.
    return [*shards, current] if current or not shards else shards


def _file_names(count: int) -> list[str]:
    """Return the file names that Hugging Face uses for ``count`` files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_index(
    out: Path,
    paths: list[Path],
    shards: list[list[str]],
    tensors: Mapping[str, TensorInfo],
) -> None:
    """Write the index that maps names to files."""
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in tensors.values())},
        "weight_map": {
            name: path.name
            for path, names in zip(paths, shards, strict=True)
            for name in names
        },
    }
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
