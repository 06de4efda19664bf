"""Reads byte intervals of a checkpoint's files, and verifies each block once.

::

    check   read the blocks that a slice touches | compare crc32 | fill, if new
    fill    read the other slices once more, straight into their destination
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.direct import named_errors
from composable_fsdp.storage.directory import open_plain
from composable_fsdp.storage.manifest import BLOCK, File
from composable_fsdp.storage.writer import bytes_of

DescribeBytes = Callable[[int, int], str]
"""Returns names of the tensors in bytes ``[begin, end)`` of the payload."""
DescribeRequest = Callable[[tuple[Any, ...]], str]
"""Returns the name of the wanted slice, from a ``ReadRequest``'s ``what``."""
_LISTED = 500
"""The number of buffers that a single ``preadv`` may fill; systems allow 1024."""
_GAP = 4096
"""The largest gap between two slices, in bytes, that is read and dropped."""


class ReadRequest(NamedTuple):
    """Bytes ``[begin, end)`` of the payload, and their destination.

    ``into`` is a contiguous tensor in host memory, filled from byte ``at``; None if
    the bytes are only to be verified. ``what`` describes the bytes, for ``told``.
    """

    begin: int
    end: int
    into: Tensor | None
    at: int
    what: tuple[Any, ...]

    def data(self) -> memoryview:
        """Return the memory of the destination."""
        # Made on use and not stored: a view consists of several Python objects per
        # request.
        assert self.into is not None
        return bytes_of(self.into)[self.at : self.at + self.end - self.begin]


class BlockFile:
    """The file of a rank, opened on the first read.

    Args:
        path: the path of the file.
        file: the sizes and checksums that the manifest says.
        blame: names the tensors in an interval of bytes, for error messages.
        told: names the wanted slice, for error messages.
    """

    def __init__(
        self, path: str, file: File, blame: DescribeBytes, told: DescribeRequest
    ) -> None:
        self.path, self.file, self.blame, self.told = path, file, blame, told
        self._handle = -1
        # Numbers of the blocks whose checksum has been verified.
        self._good: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether the file exists and has the expected size and the expected header."""
        return self._handle >= 0

    def check(self, wants: Sequence[ReadRequest]) -> None:
        """Verify the header and each block that ``wants`` touch; fill their ``into``.

        ``wants`` are in file order. Requests without ``into`` are only verified.

        Raises: CheckpointError, for a missing, short or damaged file.
        """
        if not wants:
            return
        self._open()
        # The only block in memory, even for a large file. As ``wants`` are in file
        # order, the buffer still holds the block that two neighbouring requests share.
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
                # Copy the verified bytes; a block that was verified in an earlier call
                # is not in the buffer, so the bytes are read again.
                if block == loaded:
                    part[:] = buffer[low - start : high - start]
                else:
                    self._read(part, low)

    def fill(self, wants: Sequence[ReadRequest]) -> None:
        """Fill the ``into`` of all requests, verified by ``check``, in file order."""
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
            # A single system call fills many destinations: a call per small parameter
            # would cost more than reading the bytes.
            try:
                count = os.preadv(self._handle, parts, self.file.header_nbytes + begin)
            except OSError:
                count = -1
            if count < size:
                # After a short read or an error, read each request by itself: the
                # single reads succeed, or raise an error that names the lost slice.
                for want in listed:
                    self._read(want.data(), want.begin)

    def close(self) -> None:
        """Close the file, if open."""
        if self._handle >= 0:
            # Nothing was written, so a failure of the system loses nothing.
            with suppress(OSError):
                os.close(self._handle)
            self._handle = -1

    def _verify(self, block: int, buffer: memoryview, want: ReadRequest) -> None:
        """Read the block into ``buffer`` and verify the checksum."""
        start = block * BLOCK
        size = min(BLOCK, self.file.payload_nbytes - start)
        self._read(buffer[:size], start)
        if zlib.crc32(buffer[:size]) != self.file.blocks[block]:
            raise self._damaged(start, start + size, self.told(want.what))
        self._good.add(block)

    def _read(self, data: memoryview, begin: int) -> None:
        """Fill ``data`` with the bytes of the payload from ``begin``."""
        done = 0
        # ``preadv`` may return fewer bytes than asked for.
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
        """Open the file and verify size and header, if not open yet."""
        if self._handle >= 0:
            return
        handle = open_plain(self.path)
        try:
            with named_errors(self.path):
                self._check_header(handle)
        except BaseException:
            # ``close`` would not find the handle: ``self._handle`` is set below.
            os.close(handle)
            raise
        self._handle = handle

    def _check_header(self, handle: int) -> None:
        """Raise CheckpointError if size or header differ from the manifest."""
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
        """Return the error for a block with another checksum."""
        asked = f" It was read for {wanted}." if wanted else ""
        return CheckpointError(
            f"{self.path}: bytes {begin} to {end} of the payload have another checksum "
            f"than the manifest says; they hold {self.blame(begin, end)}.{asked} "
            "Use another checkpoint."
        )


def _neighbours(wants: Sequence[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """Yield lists of requests that are close together, for a single system call."""
    listed: list[ReadRequest] = []
    end = 0
    for want in wants:
        if want.begin == want.end:
            continue
        # Reading a small gap costs less than another system call.
        far = not 0 <= want.begin - end <= _GAP
        if listed and (far or len(listed) == _LISTED):
            yield listed
            listed = []
        listed.append(want)
        end = want.end
    if listed:
        yield listed
