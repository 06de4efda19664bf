"""Reads ``torch.save`` files, by torch's restricted reader, and safetensors."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import inner_file, read_document
from composable_fsdp.storage.formats.nested import NestedSource
from composable_fsdp.storage.manifest import CODES, Span, require_storable
from composable_fsdp.storage.source import LazyTensor, Source, TensorInfo
from composable_fsdp.storage.values import MAX_DEPTH
from composable_fsdp.storage.writer import bytes_of, header_of, in_host_memory

END = ".safetensors"
SINGLE = f"model{END}"
INDEX = "model.safetensors.index.json"

_DTYPES = {code: dtype for dtype, code in CODES.items()}


class SafetensorsSource(Source):
    """Weights in safetensors files; without optimizer and extra state."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._files: dict[str, Any] = {}
        model: dict[str, TensorInfo] = {}
        self.optim: Mapping[str, Mapping[str, TensorInfo]] = {}
        self.param_groups = None
        self.extra = None
        told: dict[str, str] = {}
        for file, wanted in _files(path).items():
            opened = _opened(file)
            told.update(opened.metadata() or {})
            names = opened.keys()
            if wanted is not None and (missing := sorted(wanted - set(names))):
                raise CheckpointError(
                    f"{file} lacks {missing[:8]}, which {INDEX} says are in it. Copy "
                    "the checkpoint again, with all its files."
                )
            for name in names:
                # Tensors that the index does not assign to this file are ignored.
                if wanted is not None and name not in wanted:
                    continue
                slices = opened.get_slice(name)
                if (dtype := _DTYPES.get(slices.get_dtype())) is None:
                    raise CheckpointError(
                        f"{file}: {name!r} has the dtype {slices.get_dtype()}, which "
                        "torch cannot hold."
                    )
                model[name] = TensorInfo(dtype, tuple(slices.get_shape()))
                self._files[name] = opened
        self.model = model
        # The metadata may hold any texts, also of other programs.
        self.aliases = {
            name: kept
            for name, kept in told.items()
            if kept in self.model and name not in self.model and name != "format"
        }

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        # A view of the mapped file, which is private: writing into it changes no file.
        whole: Tensor = self._files[name].get_tensor(name)
        return whole.view(-1)[start:stop]

    def close(self) -> None:
        """Drop the mappings; each ends with the last tensor that shares the memory."""
        self._files.clear()


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


def _opened(file: Path) -> Any:
    """Return the library's reader, which has checked offsets, sizes and length."""
    try:
        # Its types want ``with``; a mapping ends with the last tensor that shares it.
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
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
        entries = {name: self._tensors[name] for name in names}
        header, begins = header_of(entries, told)
        file.write(header)
        # The file has the final size from the start; elements are written in any order.
        file.truncate(len(header) + sum(each.nbytes for each in entries.values()))
        for name, begin in begins.items():
            self._at[name] = (file, len(header) + begin)

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


def open_torch(path: Path) -> NestedSource:
    """Open a file that ``torch.save`` wrote."""
    try:
        require_stored(path, sums=False)
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise refusal(path, error) from error
    except Exception as error:  # torch's reader raises many kinds of errors.
        raise CheckpointError(
            f"{path} is damaged or no torch.save file: {_first_line(error)} Copy it "
            "again."
        ) from error
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(tree).__name__}; expected a dictionary. Save "
            '{"model": model.state_dict(), ...}.'
        )
    return TorchSource(str(path), lazy_tensors(tree, str(path), path.stat().st_size))


class TorchSource(NestedSource):
    """A file that ``torch.save`` wrote, whose archive has a checksum per tensor."""

    def require_checksums(self) -> None:
        try:
            require_stored(self.path, sums=True)
        except Exception as error:  # zipfile raises many kinds of errors.
            raise CheckpointError(
                f"{self.path} is damaged: {error}. Copy it again (unless it was saved "
                "after torch.serialization.set_crc32_options(False), which writes "
                "wrong ones)."
            ) from error


def require_stored(file: str | Path | IO[bytes], *, sums: bool) -> None:
    """Raise zipfile.BadZipFile for a compressed record, or (``sums``) a damaged one."""
    # ``torch.save`` compresses none; mapped, packed bytes would be taken for values.
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"record {record.filename!r} is compressed")
        # ``torch.load`` does not compare checksums (checked on torch 2.13).
        if sums and (name := archive.testzip()) is not None:
            told = f"its record {name!r} has another checksum than it says"
            raise zipfile.BadZipFile(told)


def refusal(what: object, error: Exception) -> CheckpointError:
    """Return the error for a pickle with more than tensors and plain values."""
    return CheckpointError(
        f"{what} holds a pickle with more in it than tensors and plain values, or a "
        f"damaged one, and was refused; nothing in it was run: {_first_line(error)} "
        "Save state dicts instead of objects."
    )


def _first_line(error: Exception) -> str:
    """Return the reason of a load error, without the rest of the message."""
    # torch's message goes on to explain how to switch the protection off.
    asked = re.search(r"(?i:global) (?:GLOBAL )?([\w.]+\.\w+)", str(error))
    if asked:
        return f"it asks for {asked[1]}."
    line = str(error).strip().partition("\n")[0].strip()
    if not line or "weights_only" in line:
        line = type(error).__name__
    return line if line.endswith(".") else f"{line}."


_EXPANDED = 2**30
"""The bytes that tensors of few bytes in the file may stand for: saved masks."""


def lazy_tensors(value: Any, where: str, nbytes: int) -> Any:
    """Return an unpickled value of ``nbytes`` with a ``LazyTensor`` for each tensor."""
    # A value that is pickled once takes a byte; tuples that share their halves do not.
    left, space = nbytes + 1000, nbytes + _EXPANDED
    places: set[Hashable] = set()

    def lazy(value: Any, where: str, depth: int) -> Any:
        nonlocal left, space
        left -= 1
        problem = ""
        if left < 0 or depth > MAX_DEPTH:
            problem = "more nested values than bytes, or too deep ones"
        elif isinstance(value, Tensor):
            found = _lazy_tensor(value, where)
            if found.storage not in places:
                places.add(found.storage)
                space -= found.info.nbytes
            if space >= 0:
                return found
            problem = f"a tensor of {found.info.shape}"
        if problem:
            raise CheckpointError(
                f"{where[:1000]} holds {problem}, which no checkpoint does. The "
                "checkpoint is damaged or hostile; use another one."
            )
        if isinstance(value, dict):
            copied = {}
            # ``dict.items``: a pickle can set an attribute of the name on a dict.
            for key, each in dict.items(value):
                key = lazy(key, where, depth + 1)
                # A key may be a text of any length.
                copied[key] = lazy(each, f"{where}, {str(key)[:200]}", depth + 1)
            return copied
        if isinstance(value, list | tuple):
            items = [lazy(each, where, depth + 1) for each in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    return lazy(value, where, 0)


def _lazy_tensor(tensor: Tensor, where: str) -> LazyTensor:
    """Return a ``LazyTensor`` of ``tensor``, which must have plain values."""
    # Other classes may hold only a part of the values, as DTensor does.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{where} is a {type(tensor).__name__} of layout {tensor.layout}; expected "
            "a plain dense tensor. Save a full state dict, or with "
            "torch.distributed.checkpoint, whose directories can be read."
        )
    if tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(f"{where} is a meta or quantized tensor without values.")
    tensor = tensor.detach()
    # Equal views of the same memory are tied; an empty tensor has no memory.
    place = (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.stride(),
        tensor.shape,
        tensor.dtype,
    )

    info = TensorInfo(tensor.dtype, tuple(tensor.shape))

    def read(start: int, stop: int) -> Tensor:
        if tensor.is_contiguous():
            return tensor.view(-1)[start:stop]
        # ``reshape(-1)`` would copy the whole of an expanded tensor for one element.
        result = torch.empty(stop - start, dtype=tensor.dtype, device="cpu")
        for box in Span(start, stop).boxes(info.shape):
            part = tensor
            for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, at, size)
            result[box.start : box.stop].view(box.sizes).copy_(part)
        return result

    return LazyTensor(info, read, place if tensor.numel() else None)
