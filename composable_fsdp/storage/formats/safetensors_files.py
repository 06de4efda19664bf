"""Reads and writes safetensors: a file, or a directory in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import inner_file, read_document
from composable_fsdp.storage.manifest import CODES, require_storable
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.storage.writer import bytes_of, header_bytes, in_host_memory

END = ".safetensors"
SINGLE = f"model{END}"
INDEX = "model.safetensors.index.json"

_DTYPES = {code: dtype for dtype, code in CODES.items()}


class SafetensorsSource(Source):
    """Weights in safetensors files; without optimizer and extra state."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._maps: dict[Path, Tensor] = {}
        self._at: dict[str, tuple[Path, int]] = {}
        self._model: dict[str, TensorInfo] = {}
        self.optim: Mapping[str, Mapping[str, TensorInfo]] = {}
        self.param_groups = None
        self.extra = None
        told: dict[str, str] = {}
        for file, wanted in _files(path).items():
            told.update(self._open(file, wanted))
        self.model = self._model
        # The metadata may hold any texts, also of other programs.
        self.aliases = {
            name: kept
            for name, kept in told.items()
            if kept in self.model and name not in self.model and name != "format"
        }

    def _open(self, file: Path, wanted: set[str] | None) -> dict[str, str]:
        """Add the tensors of a file, and return the file's metadata."""
        header, begin = _header(file)
        # The only key that is no tensor; the safetensors library accepts null there.
        metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if wanted is not None and not wanted <= header.keys():
            missing = sorted(wanted - header.keys())
            raise CheckpointError(
                f"{file} lacks {missing[:8]}, which {INDEX} says are in it. Copy the "
                "checkpoint again, with all its files."
            )
        # Tensors that the index does not assign to this file are ignored.
        for name, entry in header.items():
            if wanted is not None and name not in wanted:
                continue
            if (dtype := _DTYPES.get(entry["dtype"])) is None:
                raise CheckpointError(
                    f"{file}: {name!r} has the dtype {entry['dtype']}, which torch "
                    "cannot hold."
                )
            self._model[name] = TensorInfo(dtype, tuple(entry["shape"]))
            self._at[name] = (file, begin + entry["data_offsets"][0])
        return metadata

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        info = self.model[name]
        file, begin = self._at[name]
        if start == stop:
            return torch.empty(0, dtype=info.dtype, device="cpu")
        if file not in self._maps:
            size = file.stat().st_size
            # Private (``shared=False``): writing into the result changes no file.
            self._maps[file] = torch.from_file(
                str(file), shared=False, size=size, dtype=torch.uint8
            )
        size = info.dtype.itemsize
        raw = self._maps[file][begin + start * size : begin + stop * size]
        if raw.numel() != (stop - start) * size:
            raise CheckpointError(f"{file} ends before {name!r} does.")
        if raw.storage_offset() % size:
            raw = raw.clone()  # a view in ``dtype`` needs an aligned offset
        return raw.view(info.dtype)

    def close(self) -> None:
        """Drop the mappings; each ends with the last tensor that shares the memory."""
        self._maps.clear()


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Return the files, and the names to read from each (None: all tensors)."""
    if not path.is_dir():
        return {path: None}
    # If both files exist, the index is used.
    if not (path / INDEX).exists():
        return {inner_file(path, SINGLE): None}
    index = inner_file(path, INDEX)
    data = read_document(str(index))
    try:
        pairs = list(json.loads(data)["weight_map"].items())
    except Exception as error:  # Deeply nested JSON exhausts the stack, too.
        raise CheckpointError(
            f"{index} expected JSON with a 'weight_map' from names to files; it is "
            f"damaged: {error}."
        ) from error
    names: dict[object, set[str]] = {}
    for name, file in pairs:
        # ``inner_file`` refuses a value that is not a plain file name.
        names.setdefault(file if isinstance(file, str) else repr(file), set()).add(name)
    return {inner_file(path, file): wanted for file, wanted in names.items()}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return a file's table of tensors, and the byte where the data begins."""
    try:
        with safe_open(file, framework="pt"):
            pass  # The library checks offsets, sizes and file length.
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            return json.loads(stream.read(length)), 8 + length
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is no complete safetensors file: {error}. Copy it again."
        ) from error


class SafetensorsWriter:
    """The files of a set of tensors while they are written."""

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
        names, count = [SINGLE], len(shards)
        if count > 1:
            names = [f"model-{i + 1:05d}-of-{count:05d}{END}" for i in range(count)]
        if not single:
            out.mkdir()
        for file, held in zip(names, shards, strict=True):
            self._begin(out if single else out / file, held, aliases)
        if count > 1:
            pairs = zip(names, shards, strict=True)
            total = sum(info.nbytes for info in tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, held in pairs for name in held},
            }
            (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _begin(self, path: Path, names: list[str], aliases: Mapping[str, str]) -> None:
        """Write the header of a file, and compute the places of the tensors."""
        file = path.open("wb")
        self._files.append(file)
        # As ``safetensors.torch.save_model`` writes ties; other readers ignore them.
        told = {name: kept for name, kept in aliases.items() if kept in names}
        end, places = 0, {}
        # Largest elements first: each begins at a multiple of the element size.
        for name in sorted(names, key=lambda n: -self._tensors[n].dtype.itemsize):
            places[name] = [end, end + self._tensors[name].nbytes]
            end = places[name][1]
        # The header lists the tensors in the model's order; the places may differ.
        header = {"__metadata__": {"format": "pt", **told}} | {
            name: {
                "dtype": CODES[self._tensors[name].dtype],
                "shape": self._tensors[name].shape,
                "data_offsets": places[name],
            }
            for name in names
        }
        # The data begins at a multiple of the largest element size.
        text = header_bytes(header, 8)
        file.write(text)
        # The file has the final size from the start; elements are written in any order.
        file.truncate(len(text) + end)
        for name, (begin, _) in places.items():
            self._at[name] = (file, len(text) + begin)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write ``values`` of any shape at element ``start`` of tensor ``name``."""
        file, begin = self._at[name]
        file.seek(begin + start * values.dtype.itemsize)
        host = in_host_memory(values)
        file.write(bytes_of(host))
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


def _shards(tensors: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Return the names per file, in order: up to ``limit`` bytes or a single tensor."""
    # The rule of huggingface_hub, so that both write the same files.
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
