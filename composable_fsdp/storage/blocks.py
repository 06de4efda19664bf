"""Reading a checkpoint's files: only the bytes asked for, each block verified once.

A slice is verified by reading the blocks of ``BLOCK`` bytes that it touches, one at a
time into one buffer; then its bytes are read straight to where they are wanted. So
beside the destination there is one block in memory, whatever the files' size.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.directory import open_plain
from composable_fsdp.storage.manifest import BLOCK, File
from composable_fsdp.storage.writer import bytes_of

Blame = Callable[[int, int], str]
"""Names what lies in bytes ``[begin, end)`` of the payload."""


class BlockFile:
    """One rank's file, opened when it is first needed."""

    def __init__(self, path: str, file: File, blame: Blame) -> None:
        self.path, self.file, self.blame = path, file, blame
        self._handle = -1
        self._good: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether the file is there, whole, and has the right header."""
        return self._handle >= 0

    def check(self, begin: int, end: int, wanted: str) -> None:
        """Verify the header, and the blocks that hold bytes ``[begin, end)``.

        ``wanted`` is what they are asked for, in messages.

        Raises: CheckpointError, for a missing, short or damaged file.
        """
        self._open()
        if begin == end:
            return
        buffer: memoryview | None = None
        for block in range(begin // BLOCK, (end - 1) // BLOCK + 1):
            if block in self._good:
                continue
            buffer = buffer or _block_buffer()
            start = block * BLOCK
            size = min(BLOCK, self.file.payload_nbytes - start)
            self._read(buffer[:size], start)
            if zlib.crc32(buffer[:size]) != self.file.blocks[block]:
                raise self._damaged(start, start + size, wanted)
            self._good.add(block)

    def read(self, into: torch.Tensor, begin: int) -> None:
        """Fill a contiguous tensor in host memory; what was checked before is not read
        again for that."""
        data = bytes_of(into)
        if len(data):
            self._open()
            self._read(data, begin)

    def close(self) -> None:
        """Give the file back."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

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


def _block_buffer() -> memoryview:
    return memoryview(bytearray(BLOCK))
