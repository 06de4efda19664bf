"""Reads weights from safetensors: a file, or a directory in Hugging Face's layout.

Such a directory holds ``model.safetensors``, or several files and an index that maps
tensors to files. Ties are in a file's metadata as ``{other name: kept name}``, where
``safetensors.torch.save_model`` puts them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import inner_file, read_document
from composable_fsdp.storage.manifest import CODES
from composable_fsdp.storage.source import Source, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {code: dtype for dtype, code in CODES.items()}


def is_safetensors(path: str) -> bool:
    """Return whether the file starts with a length and the start of a JSON object."""
    return file_start(path)[8:] == b"{"


def file_start(path: str) -> bytes:
    """Return the first nine bytes of a regular file; empty for any other path."""
    if not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


class SafetensorsSource(Source):
    """Weights in safetensors files; without optimizer and extra state.

    The files are mapped into memory, and tensors that are read share the mapping.

    Raises: CheckpointError, for a file that is missing, damaged, or outside the
    directory.
    """

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
        # The metadata may hold any texts, also of other programs: keep only pairs that
        # name a missing tensor and an existing tensor.
        self.aliases = {
            name: kept
            for name, kept in told.items()
            if kept in self.model and name not in self.model and name != "format"
        }

    def _open(self, file: Path, wanted: set[str] | None) -> dict[str, str]:
        """Add the tensors of a file, and return the file's metadata."""
        header, begin = _header(file)
        # The only key of the header that is not a tensor.
        # The safetensors library accepts null there.
        metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if wanted is not None and not wanted <= header.keys():
            missing = sorted(wanted - header.keys())
            raise CheckpointError(
                f"{file} lacks {missing[:8]}, which {INDEX} says are in it. Copy the "
                "checkpoint again, with all its files."
            )
        # Tensors that the index does not assign to this file are ignored.
        for name in header if wanted is None else (n for n in header if n in wanted):
            entry = header[name]
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(
                    f"{file}: {name!r} has the dtype {entry['dtype']}, which torch "
                    "cannot hold."
                )
            self._model[name] = TensorInfo(
                _DTYPES[entry["dtype"]], tuple(entry["shape"])
            )
            self._at[name] = (file, begin + entry["data_offsets"][0])
        return metadata

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of a tensor; see ``Source``.

        Raises: CheckpointError, if the file is too short.
        """
        info = self.model[name]
        file, begin = self._at[name]
        if start == stop:
            return torch.empty(0, dtype=info.dtype, device="cpu")
        if file not in self._maps:
            size = file.stat().st_size
            # A private mapping (``shared=False``): writing into the result changes no
            # file.
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
    try:
        weights = json.loads(read_document(str(index)))["weight_map"]
        pairs = list(weights.items())
    # Deeply nested JSON exhausts the stack.
    except (
        AttributeError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
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
