"""Host memory in which values wait, and files that are written as a stream.

A file is safetensors, with a checksum per block of payload.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from composable_fsdp.storage.directory import named_errors
from composable_fsdp.storage.manifest import BLOCK, CODES, File
from composable_fsdp.storage.storages import Upload, is_url, split, storage_of


@contextmanager
def paused_collection() -> Iterator[None]:
    """Let the garbage collector wait until the end of the block; also a decorator."""
    # None of a checkpoint's many records is garbage, and to look took 40 % of a load.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Of two threads in such a block, the first that entered switches on again.
        if was_on:
            gc.enable()


_ALIGNMENT = 64


class _PinnedMap(mmap.mmap):
    """Mapped memory that CUDA knows; no longer, before the memory is unmapped."""

    address = 0

    def __del__(self) -> None:
        # At the exit of the interpreter, CUDA may be gone.
        with suppress(Exception):
            if self.address:
                _cudart().cudaHostUnregister(self.address)


def host_buffer(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Return ``nbytes`` of host memory that no code has used."""
    # Private: shared memory, the default, would be seen by forked processes, too. In
    # pages of 4 KiB: to find those of 2 MiB took three times as long as the load.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    buffer = _PinnedMap(-1, max(nbytes, 1), flags=flags)
    # torch's own pinned memory is rounded up to a power of two.
    if pinned:
        _pin(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes]


def _pin(buffer: _PinnedMap) -> None:
    """Register the memory with CUDA until the memory is freed; warn if refused."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    # 1: pinned for all devices of the process.
    code = int(_cudart().cudaHostRegister(address, len(buffer), 1))
    if code:
        # Copies to pageable memory have the same values, and the call takes longer.
        warnings.warn(
            f"CUDA refused to pin {len(buffer)} bytes of host memory (error {code}): "
            "async_save copies more slowly. Free host memory, or raise the limit of "
            "locked memory (ulimit -l).",
            stacklevel=2,
        )
        return
    buffer.address = address


def _cudart() -> Any:
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no type


def parts_of(buffer: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return a part of ``buffer`` per size in bytes, each aligned for every dtype."""
    parts, at = [], 0
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += aligned(size)
    return parts


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory holds the values in order, on the host."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    # Lazily conjugated or negated tensors hold other values than they represent.
    return on_host and not tensor.is_conj() and not tensor.is_neg()


def note_write(tensor: Tensor) -> None:
    """Tell autograd that the memory was changed without an operator of torch."""
    # A tensor saved for backward before the load no longer has the saved values.
    if not tensor.is_inference():
        increment_version(tensor)


def aligned(nbytes: int) -> int:
    """Return the smallest multiple of the alignment that holds ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def cpus_per_rank() -> int:
    """Return how many threads of each rank of this machine can run at the same time."""
    # macOS does not tell on which processors the process may run.
    allowed = getattr(os, "sched_getaffinity", None)
    cpus = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    dist = torch.distributed
    there = dist.is_available() and dist.is_initialized()
    # The ranks of this machine, as far as known; else of the job.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return max(1, cpus // (ranks or (dist.get_world_size() if there else 1)))


ALIGNMENT = 64
"""The payload begins at a multiple of this many bytes, for readers that map files."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry to write: a key, and a function that yields the elements."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Called when the entry is written: host memory holds a single tensor of an entry.
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


def of_tensor(key: str, tensor: Tensor) -> Piece:
    """Return the piece of a whole tensor."""
    return Piece(key, tensor.dtype, tuple(tensor.shape), lambda: [tensor.detach()])


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces in file order: large elements first, so entries are aligned."""
    # Sizes are powers of 2, so that entries begin at a multiple. The sort is stable.
    return sorted(pieces, key=lambda piece: -piece.dtype.itemsize)


def places_of(pieces: Sequence[Piece]) -> dict[str, int]:
    """Return the first payload byte of each entry, by key."""
    begins, end = {}, 0
    for piece in pieces:
        begins[piece.key] = end
        end += piece.nbytes
    return begins


def write_file(path: str, pieces: Sequence[Piece], block: int = BLOCK) -> File:
    """Write ``pieces`` as a new file; on return, the file is on the disk."""
    header = _header(pieces)
    total = sum(piece.nbytes for piece in pieces)
    done, crc, blocks = 0, 0, list[int]()
    with _new_file(path, total) as out:
        out.write(memoryview(header))
        for piece in pieces:
            end = done + piece.nbytes
            for part in piece.pieces():
                host = in_host_memory(part)
                data = bytes_of(host)
                while len(data):
                    # Block by block: the sum reads what the write left in the cache.
                    now = data[: block - done % block]
                    out.write(now)
                    crc = zlib.crc32(now, crc)
                    done += len(now)
                    data = data[len(now) :]
                    if done % block == 0:
                        blocks.append(crc)
                        crc = 0
            assert done == end, f"{piece.key} has another size than its shape"
        out.finish()
    if done % block:
        blocks.append(crc)
    return File(
        name=split(path)[1],
        header_nbytes=len(header),
        header_crc32=zlib.crc32(header),
        payload_nbytes=total,
        blocks=tuple(blocks),
    )


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return the length and the JSON of the header, padded to ``ALIGNMENT``."""
    # The metadata of files that the safetensors library writes for torch.
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        table[piece.key] = {
            "dtype": CODES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    return header_bytes(table, ALIGNMENT)


def header_bytes(table: Mapping[str, object], alignment: int) -> bytes:
    """Return the length and the JSON of ``table``, padded to ``alignment`` bytes."""
    text = json.dumps(table, separators=(",", ":")).encode()
    # The format allows spaces after the JSON.
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _new_file(path: str, nbytes: int) -> Iterator[NewFile | Upload]:
    """Yield a new file to write, at a path or URL, for about ``nbytes``."""
    if not is_url(path):
        with NewFile(path) as file:
            yield file
        return
    storage, name = storage_of(path)
    upload = storage.create(name)
    upload.expect(nbytes)
    try:
        yield upload
    except BaseException:
        # An upload that is left alone is kept, and paid for, by an object store.
        upload.discard()
        raise


def in_host_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU, with the elements in memory in row-major order."""
    # Lazily conjugated or negated tensors hold other values than they represent.
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, without a copy."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


BUFFER = 4 << 20
"""The bytes of a write, and of what goes to the disk at a time."""
_BEHIND = 8 * BUFFER
"""The most bytes in the page cache that are not on the disk yet."""
_START, _FINISH = 2, 7
"""Flags of ``sync_file_range``: begin to write; wait, write what is left and wait."""
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}
"""Errors of systems that cannot write a part of a file out."""


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call, or None where there is none (macOS)."""
    # Starts the disk before ``fsync``, and waits for no journal. Python has no binding.
    found = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


class NewFile:
    """A new file, written from beginning to end."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with named_errors(path):
            self._file = os.open(path, flags, 0o666)
        self._waiting = bytearray()
        self._sync_range = _sync_file_range()
        # Bytes that were written, begun to be written out, and are on the disk.
        self._written = self._begun = self._on_disk = 0

    def write(self, data: memoryview) -> None:
        """Append ``data``; small data wait for more. Raises: OSError."""
        # Large data need no copy.
        if len(self._waiting) + len(data) >= BUFFER:
            self._flush()
        if len(data) >= BUFFER:
            self._write_out(data)
        else:
            self._waiting += data

    def finish(self) -> None:
        """Write what waits; on return, all bytes are on the disk."""
        self._flush()
        with named_errors(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file; bytes that wait are lost."""
        with named_errors(self._path):
            os.close(self._file)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, bytearray()
        self._write_out(memoryview(waiting))

    def _write_out(self, data: memoryview) -> None:
        """Write ``data``, begin to write the cache out, and wait for the oldest."""
        done = 0
        while done < len(data):
            with named_errors(self._path):
                done += os.write(self._file, data[done:])
        self._written += done
        # The disk writes while the next data are copied; the cache must not fill up.
        while self._written - self._begun >= BUFFER:
            self._sync(self._begun, _START)
            self._begun += BUFFER
        while self._begun - self._on_disk > _BEHIND:
            self._sync(self._on_disk, _FINISH)
            self._on_disk += BUFFER

    def _sync(self, at: int, flags: int) -> None:
        """Write ``BUFFER`` bytes from byte ``at`` out; without the call do nothing."""
        if self._sync_range is None:
            return
        if self._sync_range(self._file, at, BUFFER, flags):
            code = ctypes.get_errno()
            if code not in _UNKNOWN:
                # The system tells an error once: the ``fsync`` at the end would pass.
                raise OSError(code, os.strerror(code), self._path)
            self._sync_range = None
