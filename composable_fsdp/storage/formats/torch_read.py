"""Reads ``torch.save`` files by torch's restricted reader, mapped into memory."""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.boxes import interval_boxes
from composable_fsdp.storage.directory import bounded, require_document
from composable_fsdp.storage.formats.nested import NestedSource
from composable_fsdp.storage.source import LazyTensor, TensorInfo


def open_torch(path: Path) -> NestedSource:
    """Open a file that ``torch.save`` wrote."""
    try:
        require_uncompressed(path)
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
        # ``torch.load`` does not compare them (checked on torch 2.13).
        try:
            with bounded(self.path) as file, zipfile.ZipFile(file) as archive:
                record = archive.testzip()
        except Exception as error:  # zipfile raises many kinds of errors.
            raise CheckpointError(
                f"{self.path} is damaged: {error}. Copy it again."
            ) from error
        if record is not None:
            raise CheckpointError(
                f"{self.path} is damaged: its record {record!r} has another checksum "
                "than it says. Copy it again (unless it was saved after "
                "torch.serialization.set_crc32_options(False), which writes wrong "
                "ones)."
            )


def require_uncompressed(file: Path | IO[bytes]) -> None:
    """Raise zipfile.BadZipFile, naming the record, if a record is compressed."""
    # ``torch.save`` compresses none; mapped, packed bytes would be taken for values.
    # Bytes in memory were judged before they were read.
    opened = bounded(file) if isinstance(file, Path) else nullcontext(file)
    with opened as found, zipfile.ZipFile(found) as archive:
        for record in archive.infolist():
            # torch reads the pickle whole; the tensors are in records beside it.
            if record.filename.endswith("/data.pkl"):
                require_document(record.filename, record.file_size)
                require_bounded(archive.read(record))
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"record {record.filename!r} is compressed")


_DEEPEST = 25
"""The most tuples within one another; a key of as many may stand for 2 ** 25 items."""


def require_bounded(data: bytes) -> None:
    """Raise UnpicklingError for a pickle that takes any memory or time."""
    # Readers call ``bytearray(n)`` with the number in the pickle, hash keys (tuples
    # that share their halves stand for any number of items), and make a table as long
    # as the largest number of a memoized value.
    # The nesting of tuples in each value of the stack and of the memo.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "GLOBAL" and str(argument).endswith(" bytearray"):
            raise pickle.UnpicklingError("global builtins.bytearray")
        if "PUT" in name or name == "MEMOIZE":
            number = len(memo) if argument is None else argument
            if number > len(data):
                raise pickle.UnpicklingError(f"value {number} of {len(data)} bytes")
            memo[number] = stack[-1]
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


_MAX_DEPTH = 100
"""The deepest nesting that is read; a native checkpoint holds no deeper one."""
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
        if left < 0 or depth > _MAX_DEPTH:
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
