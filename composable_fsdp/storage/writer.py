"""A safetensors file written as a stream, with a checksum per block of payload.

::

    8 bytes: header length | header: JSON, padded with spaces | payload, end to end

The safetensors library takes all tensors of a file at once, so optimizer states would
have to be copied together into region-shaped tensors first, all of them. Here an entry
is a series of pieces, and only one piece is in host memory beside the shards.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from composable_fsdp.storage import crash
from composable_fsdp.storage.direct import DirectFile
from composable_fsdp.storage.dtypes import CODES
from composable_fsdp.storage.manifest import BLOCK, File

ALIGNMENT = 64
"""The payload begins at a multiple of it, so whoever maps the file has aligned data."""
_ZEROS = bytes(1 << 16)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to be written: its name in the file, and what gives its elements.

    ``pieces`` yields tensors on any device in order, and integers: that many zero
    bytes.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor | int]]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


def of_tensor(key: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Piece:
    """A whole tensor, converted to ``dtype`` if one is given."""
    return Piece(
        key,
        dtype or tensor.dtype,
        tuple(tensor.shape),
        lambda: [tensor.detach().to(dtype or tensor.dtype)],
    )


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """The order in a file: larger elements first, so that each entry is aligned."""
    return sorted(pieces, key=lambda piece: -piece.dtype.itemsize)


def places_of(pieces: Sequence[Piece]) -> dict[str, int]:
    """Where in the payload each entry begins, by its key."""
    begins, end = {}, 0
    for piece in pieces:
        begins[piece.key] = end
        end += piece.nbytes
    return begins


def write_file(path: str, pieces: Sequence[Piece], *, rank: int = 0) -> File:
    """Write ``pieces`` as a new file, which is on the disk when this returns.

    ``rank`` is this process's in the save, for tests that kill it.

    Raises: OSError; the file may be there in part then.
    """
    header = _header(pieces)
    total = sum(piece.nbytes for piece in pieces)
    with DirectFile(path) as out:
        out.write(header)
        payload = _Payload(out, total, rank)
        for piece in pieces:
            _write_piece(payload, piece)
        out.finish()
    return File(
        name=os.path.basename(path),
        header_nbytes=len(header),
        header_crc32=zlib.crc32(header),
        payload_nbytes=total,
        blocks=payload.finish(),
    )


def _header(pieces: Sequence[Piece]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        table[piece.key] = {
            "dtype": CODES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _Payload:
    """Passes bytes on and keeps a checksum of each block."""

    def __init__(self, out: DirectFile, total: int, rank: int) -> None:
        self.out, self.rank, self.done, self.half = out, rank, 0, total // 2
        self.crc, self.blocks = 0, list[int]()

    def write(self, data: memoryview) -> None:
        """Append ``data``, one block at a time: it is in the cache for both."""
        at = 0
        while at < len(data):
            left = BLOCK - self.done % BLOCK
            part = data[at : at + left]
            self.out.write(part)
            self.crc = zlib.crc32(part, self.crc)
            at += len(part)
            self.done += len(part)
            if self.done % BLOCK == 0:
                self.blocks.append(self.crc)
                self.crc = 0
            if self.done >= self.half:
                crash.crash_point("mid-file", self.rank)

    def finish(self) -> tuple[int, ...]:
        """The checksums, the last block's included."""
        rest = [self.crc] if self.done % BLOCK else []
        return (*self.blocks, *rest)


def _write_piece(payload: _Payload, piece: Piece) -> None:
    end = payload.done + piece.nbytes
    for part in piece.pieces():
        if isinstance(part, int):
            while part > 0:
                payload.write(memoryview(_ZEROS)[:part])
                part -= len(_ZEROS)
        else:
            host = part.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            payload.write(bytes_of(host))
    assert payload.done == end, f"{piece.key} has another size than its shape says"


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, writable, without a copy.

    The view does not keep the tensor alive.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def shard_pieces(
    parts: Iterable[tuple[int, Tensor]], shard_numel: int, itemsize: int
) -> Iterator[Tensor | int]:
    """Tensors at element offsets of a shard, in order, with zeros in between."""
    end = 0
    for offset, tensor in parts:
        if tensor.numel():
            yield (offset - end) * itemsize
            yield tensor
            end = offset + tensor.numel()
    yield (shard_numel - end) * itemsize
