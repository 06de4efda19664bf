"""Reading a checkpoint's files: only the bytes asked for, each block verified once.

A slice is verified by reading the blocks of ``BLOCK`` bytes that it touches, one at a
time into one buffer. If nothing uses its destination yet it is filled from there, else
its bytes are read once more when all slices are known to be good, straight to where
they are wanted. So beside the destination there is one block in memory, whatever the
files' size. What is wanted is read in the order of the file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import open_plain
from composable_fsdp.storage.manifest import BLOCK, File
from composable_fsdp.storage.writer import bytes_of

DescribeBytes = Callable[[int, int], str]
"""Names what lies in bytes ``[begin, end)`` of the payload."""
DescribeRequest = Callable[[tuple[Any, ...]], str]
"""Names what was wanted: a ``ReadRequest``'s ``what``."""
_LISTED = 500
"""Destinations that one system call may fill; systems take 1024."""
_GAP = 4096
"""Bytes between two slices that are read and thrown away."""


class ReadRequest(NamedTuple):
    """Bytes ``[begin, end)`` of the payload, and where they go.

    ``into``: a contiguous tensor in host memory, if they go anywhere, from its byte
    ``at``. ``what`` they are is for ``told``.
    """

    begin: int
    end: int
    into: Tensor | None
    at: int
    what: tuple[Any, ...]

    def data(self) -> memoryview:
        """Where they go. Made when it is used: it is several objects."""
        assert self.into is not None
        return bytes_of(self.into)[self.at : self.at + self.end - self.begin]


class BlockFile:
    """One rank's file, opened when it is first needed."""

    def __init__(
        self, path: str, file: File, blame: DescribeBytes, told: DescribeRequest
    ) -> None:
        self.path, self.file, self.blame, self.told = path, file, blame, told
        self._handle = -1
        self._good: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether the file is there, whole, and has the right header."""
        return self._handle >= 0

    def check(self, wants: Sequence[ReadRequest]) -> None:
        """Verify the header, and each block that ``wants`` touch; fill their ``into``.

        ``wants`` are in the order of the file.

        Raises: CheckpointError, for a missing, short or damaged file.
        """
        if not wants:
            return
        self._open()
        buffer, loaded = memoryview(b""), -1
        for want in wants:
            begin, end = want.begin, want.end
            data = None if want.into is None else want.data()
            if begin == end:
                continue
            for block in range(begin // BLOCK, -(-end // BLOCK)):
                start = block * BLOCK
                low, high = max(begin, start), min(end, start + BLOCK)
                if block not in self._good:
                    buffer = buffer or memoryview(bytearray(BLOCK))
                    self._verify(block, buffer, want)
                    loaded = block
                if data is None:
                    continue
                part = data[low - begin : high - begin]
                if block == loaded:
                    part[:] = buffer[low - start : high - start]
                else:
                    self._read(part, low)

    def fill(self, wants: Sequence[ReadRequest]) -> None:
        """Fill the ``into`` of all, checked before, in the order of the file."""
        if wants:
            self._open()
        for listed in _neighbours(wants):
            begin, size = listed[0].begin, listed[-1].end - listed[0].begin
            parts, at = [], begin
            for want in listed:
                if want.begin > at:
                    parts.append(memoryview(bytearray(want.begin - at)))
                parts.append(want.data())
                at = want.end
            try:
                count = os.preadv(self._handle, parts, self.file.header_nbytes + begin)
            except OSError:
                count = -1
            if count < size:  # one by one, to go on or to say what is lost
                for want in listed:
                    self._read(want.data(), want.begin)

    def close(self) -> None:
        """Give the file back."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _verify(self, block: int, buffer: memoryview, want: ReadRequest) -> None:
        start = block * BLOCK
        size = min(BLOCK, self.file.payload_nbytes - start)
        self._read(buffer[:size], start)
        if zlib.crc32(buffer[:size]) != self.file.blocks[block]:
            raise self._damaged(start, start + size, self.told(want.what))
        self._good.add(block)

    def _read(self, data: memoryview, begin: int) -> None:
        done = 0
        while done < len(data):
            at = self.file.header_nbytes + begin + done
            try:
                count = os.preadv(self._handle, [data[done:]], at)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {at} ({error.strerror}), "
                    f"which holds {self.blame(begin, begin + len(data))}. Use another "
                    "checkpoint."
                ) from error
            if not count:
                raise CheckpointError(
                    f"{self.path} ends at byte {at}, before "
                    f"{self.blame(begin, begin + len(data))}. Use another checkpoint."
                )
            done += count

    def _open(self) -> None:
        if self._handle >= 0:
            return
        handle = open_plain(self.path)
        try:
            self._check_header(handle)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def _check_header(self, handle: int) -> None:
        file = self.file
        size, expected = (
            os.fstat(handle).st_size,
            file.header_nbytes + file.payload_nbytes,
        )
        if size != expected:
            raise CheckpointError(
                f"{self.path} has {size} bytes, and the manifest says {expected}; "
                f"{self.blame(max(size - file.header_nbytes, 0), file.payload_nbytes)} "
                "are damaged. Use another checkpoint."
            )
        header = os.pread(handle, file.header_nbytes, 0)
        if zlib.crc32(header) != file.header_crc32:
            raise CheckpointError(
                f"{self.path}: the header has another checksum than the manifest says. "
                "Use another checkpoint."
            )

    def _damaged(self, begin: int, end: int, wanted: str) -> CheckpointError:
        asked = f" It was read for {wanted}." if wanted else ""
        return CheckpointError(
            f"{self.path}: bytes {begin} to {end} of the payload have another checksum "
            f"than the manifest says; they hold {self.blame(begin, end)}.{asked} "
            "Use another checkpoint."
        )


def _neighbours(wants: Sequence[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """What lies next to each other, which one system call reads."""
    listed: list[ReadRequest] = []
    end = 0
    for want in wants:
        if want.begin == want.end:
            continue
        far = not 0 <= want.begin - end <= _GAP
        if listed and (far or len(listed) == _LISTED):
            yield listed
            listed = []
        listed.append(want)
        end = want.end
    if listed:
        yield listed
