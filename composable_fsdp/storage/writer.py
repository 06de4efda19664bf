"""Host memory in which values wait, and files that are written as a stream."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError, warn
from composable_fsdp.naming import quoted
from composable_fsdp.storage.directory import named_errors, open_new
from composable_fsdp.storage.manifest import BLOCK, CODES, File
from composable_fsdp.storage.source import TensorInfo
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


def _cudart() -> Any:
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no type


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
    if pinned:
        # torch's own pinned memory is rounded up to a power of two.
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        # 1: pinned for all devices of the process.
        code = int(_cudart().cudaHostRegister(address, len(buffer), 1))
        if code:
            # Copies to pageable memory have the same values, and take longer.
            warn(
                f"CUDA refused to pin {len(buffer)} bytes of memory (error {code}): "
                "async_save copies more slowly. Free memory, or raise ulimit -l.",
            )
        else:
            buffer.address = address
    return torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes]


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory holds the values in order, on the host."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    # Lazily conjugated or negated tensors hold other values than they represent.
    return on_host and not tensor.is_conj() and not tensor.is_neg()


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


@dataclass(frozen=True, slots=True)
class Piece(TensorInfo):
    """An entry to write: a key, and a function that yields the elements."""

    key: str
    # Called when the entry is written: host memory holds a single tensor of an entry.
    pieces: Callable[[], Iterable[Tensor]]


def header_of(
    entries: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return a file's header, and in file order each entry's first payload byte."""
    # The metadata of files that the safetensors library writes for torch.
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begins, end = {}, 0
    # Sizes of elements are powers of 2: with large ones first, all entries are aligned.
    for key, each in sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize):
        begins[key], end = end, end + each.nbytes
        table[key] = {
            "dtype": CODES[each.dtype],
            "shape": each.shape,
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    # The format allows spaces after the JSON. Readers that map files need alignment.
    text += b" " * (aligned(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text, begins


def write_file(
    path: str, pieces: Sequence[Piece], block: int = BLOCK
) -> tuple[File, dict[str, int]]:
    """Write a new file, which is then on the disk; return also the places, by key."""
    by_key = {piece.key: piece for piece in pieces}
    header, begins = header_of(by_key)
    total = sum(piece.nbytes for piece in pieces)
    done, crc, blocks = 0, 0, list[int]()
    out: Upload
    if is_url(path):
        storage, name = storage_of(path)
        out = storage.create(name)
    else:
        out = NewFile(path)
    try:
        out.expect(total)
        out.write(memoryview(header))
        for key in begins:
            end = done + by_key[key].nbytes
            for part in by_key[key].pieces():
                host = in_host_memory(part)
                data = bytes_of(host)
                for at in range(0, len(data), _STEP):
                    # The sums read what the write left in the cache.
                    left = data[at : at + _STEP]
                    out.write(left)
                    while len(left):
                        now = left[: block - done % block]
                        crc = zlib.crc32(now, crc)
                        done += len(now)
                        left = left[len(now) :]
                        if done % block == 0:
                            blocks.append(crc)
                            crc = 0
            assert done == end, f"{key} has another size than its shape"
        out.finish()
    except BaseException:
        # An upload that is left alone is kept, and paid for, by an object store.
        out.discard()
        raise
    if done % block:
        blocks.append(crc)
    name, size = split(path)[1], len(header)
    return File(name, size, zlib.crc32(header), total, tuple(blocks)), begins


def in_host_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU, with the elements in memory in row-major order."""
    # Lazily conjugated or negated tensors hold other values than they represent.
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def require_memory(tensor: Tensor, name: str, what: str) -> None:
    """Raise CheckpointError for a dense tensor whose storage was resized."""
    numel = tensor.numel()
    if tensor.is_meta or not numel:
        return
    # For any strides: none is negative.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in pairs)
    nbytes = tensor.untyped_storage().nbytes()
    # A read behind the end, or of no address, would end the process by a signal.
    if nbytes <= last * tensor.element_size():
        raise CheckpointError(
            f"{quoted(name)} has {numel} elements, and its storage was resized to "
            f"{nbytes} bytes; {what} expects tensors with memory, and did nothing. "
            "Resize the storage and set the values, or leave the tensor out."
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, without a copy."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


BUFFER = 4 << 20
_LARGE, _STEP = 1 << 18, 1 << 20
"""The bytes that are written without a copy, and that are written at a time."""
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


class NewFile(Upload):
    """A new file of a local directory."""

    def __init__(self, path: str) -> None:
        self._path = path
        with named_errors(path):
            # To copy large data would take longer than a call.
            self._file = open(open_new(path), "wb", buffering=_LARGE)  # noqa: SIM115
        self._sync_range = _sync_file_range()
        # Bytes that were written, begun to be written out, and are on the disk.
        self._written = self._begun = self._on_disk = 0

    def write(self, data: memoryview) -> None:
        """Append ``data``; small data wait for more. Raises: OSError."""
        with named_errors(self._path):
            self._file.write(data)
        self._written += len(data)
        # The disk writes while the next data are copied; the cache must not fill up.
        while self._written - self._begun >= BUFFER:
            self._sync(self._begun, _START)
            self._begun += BUFFER
        while self._begun - self._on_disk > _BEHIND:
            self._sync(self._on_disk, _FINISH)
            self._on_disk += BUFFER

    def finish(self) -> None:
        """Write what waits; on return, all bytes are on the disk."""
        with named_errors(self._path), self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def discard(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()

    def _sync(self, at: int, flags: int) -> None:
        """Write ``BUFFER`` bytes from byte ``at`` out; without the call do nothing."""
        if self._sync_range is None:
            return
        if self._sync_range(self._file.fileno(), at, BUFFER, flags):
            code = ctypes.get_errno()
            if code not in _UNKNOWN:
                # The system tells an error once: the ``fsync`` at the end would pass.
                raise OSError(code, os.strerror(code), self._path)
            self._sync_range = None
