"""Claims on files written through the page cache: bytes and errors."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from composable_fsdp import save
from composable_fsdp.storage import writer
from composable_fsdp.storage.writer import BUFFER, NewFile

SIZES = (0, 1, 4095, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER + 4097)


def written(path: Path, size: int) -> tuple[bytes, bytes]:
    """What was written in uneven parts, and what is in the file."""
    rng = random.Random(size)
    data, at = rng.randbytes(size), 0
    with NewFile(str(path)) as file:
        while at < size:
            count = rng.choice((1, 8, 5000, BUFFER, 3 * BUFFER))
            file.write(memoryview(data)[at : at + count])
            at += count
        file.finish()
    return data, path.read_bytes()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_written(size: int, tmp_path: Path) -> None:
    """In order and to the last byte, at any size."""
    data, found = written(tmp_path / "file", size)

    assert found == data


def test_a_write_that_is_cut_short_goes_on_where_it_ended(tmp_path: Path) -> None:
    """As a signal or a limit may have it."""
    write = os.write

    def short(file: int, data: memoryview) -> int:
        return write(file, data[: max(1, len(data) // 3)])

    with mock.patch.object(os, "write", short):
        data, found = written(tmp_path / "file", BUFFER + 123)

    assert found == data


Calls = list[tuple[int, int, int]]


@contextmanager
def ranges(code: int = 0, after: int = 0) -> Iterator[Calls]:
    """Each ``sync_file_range``: begin, length, flags; ``code``: the error of a call."""
    calls: Calls = []

    def called(file: int, at: int, nbytes: int, flags: int) -> int:
        calls.append((at, nbytes, flags))
        ctypes.set_errno(code)
        return -1 if code and len(calls) > after else 0

    with mock.patch.object(writer, "_sync_file_range", return_value=called):
        yield calls


@pytest.mark.req("K-05")
def test_a_file_that_is_kept_goes_to_the_disk_while_it_is_written(
    tmp_path: Path,
) -> None:
    """Each part once, in order; no more than 36 MiB wait, also for small data."""
    with ranges() as calls:
        written(tmp_path / "file", 20 * BUFFER + 5)
    begun = [at for at, _, flags in calls if flags == 2]
    waited = [at for at, _, flags in calls if flags == 7]

    assert begun == [n * BUFFER for n in range(20)]
    assert waited == [n * BUFFER for n in range(12)]
    assert {nbytes for _, nbytes, _ in calls} == {BUFFER}


@pytest.mark.req("K-05", "X-18")
def test_an_error_while_parts_go_to_the_disk_is_raised(tmp_path: Path) -> None:
    """The system tells of a lost write once; ``fsync`` would not tell again."""
    with (
        ranges(errno.EIO, after=5),
        pytest.raises(OSError, match="Input/output error") as raised,
    ):
        written(tmp_path / "file", 20 * BUFFER)

    assert raised.value.filename == str(tmp_path / "file")


@pytest.mark.req("K-05")
def test_a_save_leaves_its_files_in_memory(tmp_path: Path) -> None:
    """The first load after the save reads no disk then."""
    save(tmp_path / "run", nn.Linear(1024, 1024))
    data = bytearray(BUFFER)

    with open(tmp_path / "run" / "rank00000.safetensors", "rb") as file:
        try:
            found = os.preadv(file.fileno(), [data], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            found = 0
        except OSError:
            pytest.skip(
                "the temporary directory is on a file system without page cache"
            )
    assert found == BUFFER
