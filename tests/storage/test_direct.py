"""Claims on files written past the page cache: their bytes on any system."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from unittest import mock

import pytest

from composable_fsdp.storage import direct
from composable_fsdp.storage.direct import BUFFER, DirectFile

SIZES = (0, 1, 4095, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER + 4097)


def written(path: Path, size: int) -> tuple[bytes, bytes]:
    """What was written in uneven parts, and what is in the file."""
    rng = random.Random(size)
    data, at = rng.randbytes(size), 0
    with DirectFile(str(path)) as file:
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


def test_a_system_that_refuses_the_flag_writes_the_ordinary_way(tmp_path: Path) -> None:
    """As tmpfs and other kernels do."""
    refused = OSError(errno.EINVAL, "Invalid argument")

    with mock.patch.object(fcntl, "fcntl", side_effect=refused):
        data, found = written(tmp_path / "file", 2 * BUFFER + 5)

    assert found == data


def test_a_system_that_refuses_the_write_is_asked_again_without_the_flag(
    tmp_path: Path,
) -> None:
    """Some take the flag and refuse what is written with it; a real error is raised."""
    write, calls = os.write, []

    def refuse_direct(file: int, data: memoryview) -> int:
        calls.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & direct._DIRECT))
        if calls[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, data)

    with mock.patch.object(os, "write", refuse_direct):
        data, found = written(tmp_path / "file", 2 * BUFFER + 5)
    with (
        mock.patch.object(os, "write", side_effect=OSError(errno.ENOSPC, "full")),
        pytest.raises(OSError, match="full"),
    ):
        written(tmp_path / "other", BUFFER)

    assert found == data
    assert calls in ([True, False, False, False], [False, False, False])


def test_a_write_that_is_cut_short_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Also inside a block of the disk, from where no direct write can go on."""
    write = os.write

    def short(file: int, data: memoryview) -> int:
        return write(file, data[: max(1, len(data) // 3)])

    with mock.patch.object(os, "write", short):
        data, found = written(tmp_path / "file", BUFFER + 123)

    assert found == data
