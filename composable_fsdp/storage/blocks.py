"""Reads byte intervals of a checkpoint's files, and verifies each block once."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import named_errors, open_plain
from composable_fsdp.storage.manifest import BLOCK, Manifest
from composable_fsdp.storage.storages import is_url, join, storage_of
from composable_fsdp.storage.validate import told_of
from composable_fsdp.storage.writer import bytes_of, cpus_per_rank

_Block = tuple[memoryview, int]
_Given = TypeVar("_Given")
_Done = TypeVar("_Done")
_READERS = 4
"""The number of reads in flight, for disks and storages that serve several at once."""
_AHEAD_BYTES = BLOCK
_FILL_BYTES = 4 * BLOCK
"""The most bytes that a read into a destination takes at once."""


class ReadRequest(NamedTuple):
    """Bytes ``[begin, end)`` of the payload, and their destination."""

    begin: int
    end: int
    into: Tensor | None
    at: int
    what: tuple[Any, ...]

    def data(self) -> memoryview:
        """Return the memory of the destination."""
        # Not stored: a view consists of several Python objects per request.
        assert self.into is not None
        return bytes_of(self.into)[self.at : self.at + self.end - self.begin]


class BlockFile:
    """The file of a rank, opened on the first read."""

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        number: int,
        told: Callable[[tuple[Any, ...]], str],
        sizes: Mapping[str, int] | None,
    ) -> None:
        self.file, self.block = manifest.files[number], manifest.block_nbytes
        self.path = join(folder, self.file.name)
        # The words for bytes of the payload, and for the slice of a ``ReadRequest``.
        self._blame, self._told = partial(told_of, manifest, number), told
        self._sizes = sizes or {}
        self._handle = -1
        self.is_open = False
        """Whether the file exists and has the expected size and the expected header."""
        self._spare: list[Any] = []
        self._good: set[int] = set()

    def check(self, wants: Sequence[ReadRequest]) -> None:
        """Verify the blocks that ``wants`` touch, and fill their ``into``."""
        if not wants:
            return
        self.open()
        touching: dict[int, list[ReadRequest]] = {}
        for want in wants:
            if want.begin < want.end:
                last = -(-want.end // self.block)
                for number in range(want.begin // self.block, last):
                    touching.setdefault(number, []).append(want)
        numbers = sorted(touching)
        new = [number for number in numbers if number not in self._good]
        # Small blocks are read together: a call per block would cost more.
        runs = list(_runs(new, max(1, _AHEAD_BYTES // self.block)))
        with _ahead(runs, self._read_run, self._readers(len(runs))) as read:
            held: dict[int, _Block] = {}
            for number in numbers:
                if number not in self._good:
                    if number not in held:
                        self._spare += [part.obj for part, _ in held.values()][:1]
                        held = next(read)
                    self._verify(number, held[number], touching[number][0])
                for want in touching[number]:
                    if want.into is None:
                        continue
                    start = number * self.block
                    low = max(want.begin, start)
                    high = min(want.end, start + self.block)
                    part = want.data()[low - want.begin : high - want.begin]
                    if number in held:
                        part[:] = held[number][0][low - start : high - start]
                    else:
                        self._read(part, low)
        self._spare.clear()

    def _read_run(self, run: tuple[int, int]) -> dict[int, _Block]:
        """Return the blocks ``[first, last]``, with sums; called in a thread."""
        first, last = run
        begin = first * self.block
        end = min((last + 1) * self.block, self.file.payload_nbytes)
        # Memory that the kernel must zero costs more than the read. ``pop`` is atomic.
        found: Any = b""
        with suppress(IndexError):
            found = self._spare.pop()
        buffer = found if len(found) >= end - begin else bytearray(end - begin)
        data = memoryview(buffer)[: end - begin]
        self._read(data, begin)
        size = self.block
        parts = {
            n: data[(n - first) * size : (n - first + 1) * size]
            for n in range(first, last + 1)
        }
        # ``crc32`` lets other threads run: blocks in flight are summed together.
        return {n: (part, zlib.crc32(part)) for n, part in parts.items()}

    def fill(self, wants: Sequence[ReadRequest]) -> None:
        """Fill the ``into`` of all requests, verified by ``check``, in file order."""
        # Not a task for each: a model may have many small parameters.
        batches: list[list[tuple[ReadRequest, int, int]]] = []
        size = _FILL_BYTES
        for want in wants:
            for begin in range(want.begin, want.end, _FILL_BYTES):
                end = min(begin + _FILL_BYTES, want.end)
                if size + end - begin > _FILL_BYTES:
                    batches.append([])
                    size = 0
                batches[-1].append((want, begin, end))
                size += end - begin
        if batches:
            self.open()
        with _ahead(batches, self._fill, self._readers(len(batches))) as filled:
            deque(filled, maxlen=0)

    def _fill(self, batch: Sequence[tuple[ReadRequest, int, int]]) -> None:
        """Fill the bytes ``[begin, end)`` of each request; called in a thread."""
        for want, begin, end in batch:
            self._read(want.data()[begin - want.begin : end - want.begin], begin)

    def _readers(self, count: int) -> int:
        """Return how many of ``count`` reads to have in flight."""
        # A thread costs more than a single read; two in a row keep the disk as busy.
        if count < 3:
            return 1
        # Processors alone copy from memory; more threads took a quarter more time.
        return _READERS if is_url(self.path) else min(_READERS, cpus_per_rank())

    def close(self) -> None:
        """Close the file, if open."""
        # Nothing was written, so a failure of the system loses nothing.
        with suppress(OSError):
            if self._handle >= 0:
                os.close(self._handle)
        self._handle, self.is_open = -1, False

    def _verify(self, block: int, loaded: _Block, want: ReadRequest) -> None:
        """Compare the sum of a block with the checksum of the manifest."""
        start, (data, crc32) = block * self.block, loaded
        if crc32 != self.file.blocks[block]:
            end, wanted = start + len(data), self._told(want.what)
            asked = f" It was read for {wanted}." if wanted else ""
            raise self._damaged(
                f": bytes {start} to {end} of the payload have another checksum than "
                f"the manifest says; they hold {self._blame(start, end)}.{asked}"
            )
        self._good.add(block)

    def _damaged(self, what: str) -> CheckpointError:
        """Return the error for a file that is not as the manifest says."""
        return CheckpointError(f"{self.path}{what} Use another checkpoint.")

    def _read(self, data: memoryview, begin: int) -> None:
        """Fill ``data`` with the bytes of the payload from ``begin``."""
        done, end = 0, begin + len(data)
        # ``preadv`` may return fewer bytes than asked for.
        while done < len(data):
            at = self.file.header_nbytes + begin + done
            try:
                count = self._fetch(data[done:], at)
            except OSError as error:
                raise self._damaged(
                    f" cannot be read at byte {at} ({error.strerror}), which holds "
                    f"{self._blame(begin, end)}."
                ) from error
            if not count:
                told = f" ends at byte {at}, before {self._blame(begin, end)}."
                raise self._damaged(told)
            done += count

    def _fetch(self, part: memoryview, at: int) -> int:
        """Fill ``part`` from byte ``at`` of the file, by a call; return how many."""
        if not is_url(self.path):
            return os.preadv(self._handle, [part], at)
        storage, name = storage_of(self.path)
        data = storage.read(name, at, at + len(part))
        part[: len(data)] = data
        return len(data)

    def _size(self) -> int:
        """Open a local file, or look an object up; return the number of bytes."""
        if not is_url(self.path):
            self._handle = open_plain(self.path)
            return os.fstat(self._handle).st_size
        if self.file.name not in self._sizes:
            raise self._damaged(" cannot be opened (there is no such object).")
        return self._sizes[self.file.name]

    def open(self) -> None:
        """Open the file and verify size and header, if not open yet."""
        if self.is_open:
            return
        file, done = self.file, 0
        try:
            with named_errors(self.path):
                header = memoryview(bytearray(file.header_nbytes))
                if (nbytes := self._size()) != file.nbytes:
                    left = max(nbytes - file.header_nbytes, 0)
                    raise self._damaged(
                        f" has {nbytes} bytes, and the manifest says {file.nbytes}; "
                        f"{self._blame(left, file.payload_nbytes)} are damaged."
                    )
                while done < len(header) and (n := self._fetch(header[done:], done)):
                    done += n
                if zlib.crc32(header) != file.header_crc32:
                    raise self._damaged(
                        ": the header has another checksum than the manifest says."
                    )
        except BaseException:
            self.close()
            raise
        self.is_open = True


def _runs(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last of numbers that follow one another, ``most`` a time."""
    begin = 0
    for i, number in enumerate(numbers, 1):
        is_last = i == len(numbers) or numbers[i] != number + 1
        if is_last or i - begin == most:
            yield numbers[begin], number
            begin = i


@contextmanager
def _ahead(
    runs: Sequence[_Given], read: Callable[[_Given], _Done], readers: int
) -> Iterator[Iterator[_Done]]:
    """Yield an iterator over the results of ``read``, ``readers`` of them at a time."""
    if readers == 1:
        yield map(read, runs)
        return
    pool = ThreadPoolExecutor(readers, "composable_fsdp load")

    def results() -> Iterator[_Done]:
        waiting = deque(pool.submit(read, run) for run in runs[:readers])
        for run in (*runs[readers:], *[None] * len(waiting)):
            done = waiting.popleft().result()
            # Submitted before the bytes are used, so that the disk never waits.
            if run is not None:
                waiting.append(pool.submit(read, run))
            yield done

    try:
        yield results()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
