"""Reads ``torch.save`` files without running code in them.

torch's restricted reader, which knows only tensors and plain containers, unpickles the
file. The file is mapped into memory, so the disk is read when elements are used.
``nested.py`` describes the accepted dictionaries.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.directory import bounded, require_document
from composable_fsdp.storage.formats.nested import NestedSource
from composable_fsdp.storage.formats.safetensors_files import file_start
from composable_fsdp.storage.source import LazyTensor, TensorInfo


def open_torch(path: Path) -> NestedSource:
    """Open a file that ``torch.save`` wrote."""
    tree = load_safely(path)
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(tree).__name__}; expected a dictionary. Save "
            '{"model": model.state_dict(), ...}.'
        )
    return TorchSource(str(path), lazy_tensors(tree, str(path), path.stat().st_size))


class TorchSource(NestedSource):
    """A file that ``torch.save`` wrote, whose archive has a checksum per tensor."""

    def require_checksums(self) -> None:
        """Read the file once and compare all checksums; see ``Source``."""
        require_checksums(Path(self.path))


def is_torch_file(path: str) -> bool:
    """Return whether the file starts as a zip archive, as from torch 1.6 on."""
    return file_start(path).startswith(b"PK\x03\x04")


def require_checksums(path: Path) -> None:
    """Compare all records of the archive ``path`` with their checksums."""
    try:
        # ``torch.load`` does not compare the checksums of records (checked on torch
        # 2.13).
        with bounded(path) as file, zipfile.ZipFile(file) as archive:
            record = archive.testzip()
    except Exception as error:  # zipfile raises many kinds of errors.
        raise CheckpointError(f"{path} is damaged: {error}. Copy it again.") from error
    if record is not None:
        raise CheckpointError(
            f"{path} is damaged: its record {record!r} has another checksum than it "
            "says. Copy it again (unless it was saved after "
            "torch.serialization.set_crc32_options(False), which writes wrong ones)."
        )


def load_safely(path: Path) -> Any:
    """Return the object in the file, with mapped tensors. Raises: as ``open_torch``."""
    try:
        require_uncompressed(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise refusal(path, error) from error
    except Exception as error:  # torch's reader raises many kinds of errors.
        raise CheckpointError(
            f"{path} is damaged or no torch.save file: {first_line(error)} Copy it "
            "again."
        ) from error


def require_uncompressed(file: Path | BytesIO) -> None:
    """Raise zipfile.BadZipFile, naming the record, if a record is compressed."""
    # ``torch.save`` compresses no record. Mapped, compressed bytes would be taken for
    # values; unpacked, a small record may fill any memory.
    # Bytes in memory were judged before they were read.
    opened = nullcontext(file) if isinstance(file, BytesIO) else bounded(file)
    with opened as found, zipfile.ZipFile(found) as archive:
        for record in archive.infolist():
            # torch reads the pickle whole; the tensors are in records beside it.
            if record.filename.endswith("/data.pkl"):
                require_document(record.filename, record.file_size)
                _require_bounded(BytesIO(archive.read(record)))
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"record {record.filename!r} is compressed")


_DEEPEST = 25
"""The most tuples within one another; a key of as many may stand for 2 ** 25 items."""


def _require_bounded(data: IO[bytes]) -> None:
    """Raise UnpicklingError for a pickle that takes any memory or time."""
    # The nesting of tuples in each value of the stack and of the memo.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "GLOBAL" and str(argument).endswith(" bytearray"):
            raise pickle.UnpicklingError("global builtins.bytearray")
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        else:
            before = opcode.stack_before
            if pickletools.markobject in before:
                at = marks.pop() - before.index(pickletools.markobject)
            else:
                at = len(stack) - len(before)
            depth = max(stack[at:], default=0) + name.startswith("TUPLE")
            if depth > _DEEPEST:
                raise pickle.UnpicklingError(f"more than {_DEEPEST} tuples in a tuple")
            stack[at:] = [depth] * len(opcode.stack_after)


def refusal(what: object, error: Exception) -> CheckpointError:
    """Return the error for a pickle with more than tensors and plain values."""
    return CheckpointError(
        f"{what} holds a pickle with more in it than tensors and plain values, or a "
        f"damaged one, and was refused; nothing in it was run: {first_line(error)} "
        "Save state dicts instead of objects."
    )


def first_line(error: Exception) -> str:
    """Return the reason of a load error, without the rest of the message."""
    # torch's message goes on to explain how to switch the protection off.
    asked = re.search(r"(?i:global) (?:GLOBAL )?([\w.]+\.\w+)", str(error))
    if asked:
        return f"it asks for {asked[1]}."
    line = str(error).strip().partition("\n")[0].strip()
    if not line or "weights_only" in line:
        line = type(error).__name__
    return line if line.endswith(".") else f"{line}."


def lazy_tensors(value: Any, where: str, nbytes: int) -> Any:
    """Return ``value`` with every tensor replaced by a ``LazyTensor``."""
    return _Walk(nbytes).lazy(value, where, 0)


_MAX_DEPTH = 100
"""The deepest nesting that is read; a native checkpoint holds no deeper one."""
_EXPANDED = 2**30
"""The bytes that tensors of fewer bytes in the file may stand for together."""


class _Walk:
    """Copies an unpickled value within the bounds that the file's size sets."""

    def __init__(self, nbytes: int) -> None:
        # A value that is pickled once takes at least one byte; few values are shared.
        self.values = nbytes + 1000
        # ``expand`` makes a large tensor of few bytes; masks may be saved so.
        self.nbytes = nbytes + _EXPANDED
        self.places: set[Hashable] = set()

    def lazy(self, value: Any, where: str, depth: int) -> Any:
        """Return the copy of ``value``; see ``lazy_tensors``."""
        self.values -= 1
        if self.values < 0 or depth > _MAX_DEPTH:
            raise _too_large(where, "more nested values than bytes, or too deep ones")
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, dict):
            return self._dict(value, where, depth)
        if isinstance(value, list | tuple):
            items = [self.lazy(each, where, depth + 1) for each in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> dict[Any, Any]:
        """Return the copy of a dict; see ``lazy``."""
        copied = {}
        # ``dict.items``: a pickle can set an attribute ``items`` on an OrderedDict.
        for key, each in dict.items(value):
            key = self.lazy(key, where, depth + 1)
            # A name grows with the depth, and a key may be a text of any length.
            name = f"{where}, {str(key)[:200]}"
            copied[key] = self.lazy(each, name, depth + 1)
        return copied

    def _tensor(self, tensor: Tensor, where: str) -> LazyTensor:
        """Return a ``LazyTensor`` of ``tensor``, whose bytes count once per storage."""
        lazy = _lazy_tensor(tensor, where)
        if lazy.storage not in self.places:
            self.places.add(lazy.storage)
            self.nbytes -= lazy.info.nbytes
        if self.nbytes < 0:
            raise _too_large(where, f"a tensor of {lazy.info.shape} over fewer bytes")
        return lazy


def _too_large(where: str, what: str) -> CheckpointError:
    """Return the error for a value that the bytes of the file do not account for."""
    return CheckpointError(
        f"{where[:1000]} holds {what}, which no checkpoint does. The checkpoint is "
        "damaged or hostile; use another one."
    )


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
    # Equal views of the same memory are a tied tensor. An empty tensor has no memory,
    # and is never tied.
    place = (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.stride(),
        tensor.shape,
        tensor.dtype,
    )

    def read(start: int, stop: int) -> Tensor:
        if tensor.is_contiguous():
            return tensor.view(-1)[start:stop]
        # ``reshape(-1)`` would copy the whole of an expanded tensor for one element.
        result = torch.empty(stop - start, dtype=tensor.dtype, device="cpu")
        for box in interval_boxes(tuple(tensor.shape), start, stop):
            part = tensor
            for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, at, size)
            result[box.start : box.stop].view(box.sizes).copy_(part)
        return result

    info = TensorInfo(tensor.dtype, tuple(tensor.shape))
    return LazyTensor(info, read, place if tensor.numel() else None)
