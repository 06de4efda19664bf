"""Claims on files: how they are written, how much is read, and how often."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard, load, save, verify
from composable_fsdp.storage import open_source, writer
from composable_fsdp.storage import save as saving
from composable_fsdp.storage.manifest import BLOCK
from composable_fsdp.storage.writer import BUFFER, NewFile
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.sharded import RankCount
from tests.support.world import World

PAGE = 4096
"""A disk is read by pages, which stay in the page cache."""


@contextmanager
def preads(
    limit: int = 1 << 40, pages: set[tuple[int, int]] | None = None
) -> Iterator[list[int]]:
    """Bytes of each read of a payload, at most ``limit``; ``pages`` gets all pages."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(handle: int, parts: Sequence[memoryview], at: int, *flags: int) -> int:
        if len(parts) > 1 and sum(map(len, parts)) > limit:
            parts = parts[:1]
        count = preadv(handle, [parts[0][:limit], *parts[1:]], at, *flags)
        counts.append(count)
        if pages is not None:
            inode = os.fstat(handle).st_ino
            last = -(-(at + count) // PAGE)
            pages.update((inode, n) for n in range(at // PAGE, last))
        return count

    with mock.patch.object(os, "preadv", counted):
        yield counts


@pytest.mark.req("K-05")
def test_each_byte_is_read_once_where_memory_allows(tmp_path: Path) -> None:
    """Of the disk: bytes that nothing uses are filled by the read that verifies them,
    others are read again from the page cache; from a URL they wait in a copy."""
    model = torch.nn.Linear(1200, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1200)).sum().backward()
    optimizer.step()
    save(tmp_path / "run", model, optimizer)
    size = 4 * 1200 * 1000

    with preads() as fresh:
        load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    pages: set[tuple[int, int]] = set()
    with preads(pages=pages) as cached:
        load(tmp_path, model, optimizer)

    assert size > BLOCK
    assert 4 * size <= sum(fresh) < 4 * size + BLOCK
    assert 6 * size <= sum(cached) < 6 * size + BLOCK
    assert 3 * size <= PAGE * len(pages) < 3 * size + BLOCK


def test_a_read_that_ends_early_goes_on(tmp_path: Path) -> None:
    """As a signal or a network file system may have it."""
    model = make("plain")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer)
    expected = everything(model, optimizer)
    step(model, optimizer, 1)

    with preads(limit=100):
        load(tmp_path, model, optimizer)

    assert same(everything(model, optimizer), expected)


def check_amplification(world: World, folder: Path) -> float:
    """Bytes of the disk that this rank reads, over the bytes that the rank holds."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    pages: set[tuple[int, int]] = set()
    with preads(pages=pages):
        load(folder, model)
    held = sum(each.numel() * 4 for each in model.parameters())
    return PAGE * len(pages) / held


@pytest.mark.req("K-05")
def test_a_rank_reads_little_more_than_it_holds(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Of small units that one rank has saved: checksums cover 16 KiB."""
    save(tmp_path / "run", nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))))

    for share in ranks(2).run(check_amplification, tmp_path):
        assert share < 1.7


@pytest.mark.req("K-05")
def test_blocks_of_any_size_and_any_run_of_slices_are_read_right(
    tmp_path: Path,
) -> None:
    """By one thread or several, in file order."""
    model = nn.Linear(700, 1000, bias=False)
    expected = model.weight.detach().clone()
    for block in (1 << 16, 1 << 18, BLOCK):
        path = tmp_path / str(block)
        with mock.patch.object(saving, "block_size", return_value=block):
            save(path, model)
        load(path, model)
        with open_source(path) as source:
            for start in range(0, 680000, 77777):
                read = source.read_model("weight", start, start + 12345)
                flat = expected.view(-1)[start : start + 12345]
                assert torch.equal(read, flat[: read.numel()])
        assert torch.equal(model.weight, expected)
        assert verify(path)


@pytest.mark.req("K-05")
def test_values_beside_the_model_are_no_views_of_a_file(tmp_path: Path) -> None:
    """A file that is written anew must not change what a caller holds."""
    file = tmp_path / "old.pt"
    torch.save({"model": {"w": torch.zeros(4)}, "noise": torch.full((99,), 5.0)}, file)
    found = open_source(file).extra["noise"]

    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))

    assert found.tolist() == [5.0] * 99


def test_a_load_is_a_write_for_autograd(tmp_path: Path) -> None:
    """A backward through weights of before the load raises."""
    model = nn.Linear(3, 3)
    save(tmp_path / "run", model)
    x = torch.ones(1, 3, requires_grad=True)
    loss = model(x).sum()

    load(tmp_path / "run", model)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SIZES = (0, 1, 4095, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER + 4097)


def written(path: Path, size: int) -> tuple[bytes, bytes]:
    """What was written in uneven parts, and what is in the file."""
    rng = random.Random(size)
    data, at = rng.randbytes(size), 0
    file = NewFile(str(path))
    try:
        while at < size:
            count = rng.choice((1, 8, 5000, 1 << 18, writer.BUFFER, 3 * writer.BUFFER))
            file.write(memoryview(data)[at : at + count])
            at += count
        file.finish()
    finally:
        file.discard()
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
PART = 1 << 14
"""In place of 4 MiB, which take seconds to make."""


@contextmanager
def ranges(code: int = 0, after: int = 0) -> Iterator[Calls]:
    """Each ``sync_file_range``: begin, length, flags; ``code``: the error of a call."""
    calls: Calls = []

    def called(file: int, at: int, nbytes: int, flags: int) -> int:
        calls.append((at, nbytes, flags))
        ctypes.set_errno(code)
        return -1 if code and len(calls) > after else 0

    with (
        mock.patch.object(writer, "_sync_file_range", return_value=called),
        mock.patch.multiple(writer, BUFFER=PART, _BEHIND=8 * PART),
    ):
        yield calls


@pytest.mark.req("K-05")
def test_a_file_that_is_kept_goes_to_the_disk_while_it_is_written(
    tmp_path: Path,
) -> None:
    """Each part once, in order; no more than nine wait, also for small data."""
    with ranges() as calls:
        written(tmp_path / "file", 20 * PART + 5)
    begun = [at for at, _, flags in calls if flags == 2]
    waited = [at for at, _, flags in calls if flags == 7]

    assert begun == [n * PART for n in range(20)]
    assert waited == [n * PART for n in range(12)]
    assert {nbytes for _, nbytes, _ in calls} == {PART}


@pytest.mark.req("K-05", "X-18")
def test_an_error_while_parts_go_to_the_disk_is_raised(tmp_path: Path) -> None:
    """The system tells of a lost write once; ``fsync`` would not tell again."""
    with (
        ranges(errno.EIO, after=5),
        pytest.raises(OSError, match="Input/output error") as raised,
    ):
        written(tmp_path / "file", 20 * PART)

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
