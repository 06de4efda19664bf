"""Writing safetensors files whose tensors come in any order and in pieces.

Names, shapes and dtypes are known first, so every tensor's place in every file is, too:
headers are written at once, and elements go where they belong as they arrive. Nothing
is held in memory but the piece at hand. A tensor may have been cut in any way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.dtypes import CODES, require_storable
from composable_fsdp.storage.formats.safetensors_read import INDEX, SINGLE
from composable_fsdp.storage.source import TensorInfo
from composable_fsdp.storage.writer import bytes_of


class SafetensorsWriter:
    """The files of one set of tensors, being written.

    Makes the directory ``out`` with Hugging Face's names for files and index; with
    ``single`` the one file ``out``. ``write`` each tensor, then ``finish``.

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
        """Write the header of one file, and note where its tensors go."""
        file = path.open("wb")
        self._files.append(file)
        told = {name: kept for name, kept in aliases.items() if kept in names}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **told}}
        at, places = 0, {}
        # Largest elements first: then each tensor begins at a multiple of its own.
        for name in sorted(names, key=lambda n: -self._tensors[n].dtype.itemsize):
            places[name] = at
            at += self._tensors[name].nbytes
        for name in names:
            info = self._tensors[name]
            header[name] = {
                "dtype": CODES[info.dtype],
                "shape": info.shape,
                "data_offsets": (places[name], places[name] + info.nbytes),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        for name, place in places.items():
            self._at[name] = (file, 8 + len(text) + place)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Put ``values``, of any shape, at element ``start`` of tensor ``name``."""
        file, begin = self._at[name]
        file.seek(begin + start * values.dtype.itemsize)
        write_elements(file, values)
        self._left[name] -= values.numel()

    def finish(self) -> None:
        """Close the files. Raises: CheckpointError, naming a tensor not all written."""
        self.close()
        short = [name for name, left in self._left.items() if left]
        if short:
            raise CheckpointError(f"Elements of {short[:8]} were not written.")

    def close(self) -> None:
        """Close the files as they are."""
        for file in self._files:
            file.close()


def write_elements(file: BinaryIO, values: Tensor) -> None:
    """Write the elements of ``values`` in row-major order, without a copy of them."""
    host = values.detach().cpu().contiguous()
    if host.is_complex():
        host = host.resolve_conj().resolve_neg()
    file.write(bytes_of(host))


def _shards(tensors: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Names by file: in their order, each file up to ``limit`` bytes or one tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += info.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_index(
    out: Path,
    paths: list[Path],
    shards: list[list[str]],
    tensors: Mapping[str, TensorInfo],
) -> None:
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in tensors.values())},
        "weight_map": {
            name: path.name
            for path, names in zip(paths, shards, strict=True)
            for name in names
        },
    }
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
