"""Claims on how much of a checkpoint is read, how often, and in which pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from composable_fsdp import load, save
from composable_fsdp.storage.manifest import BLOCK
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.sharded import message_of


@contextmanager
def preads(limit: int = 1 << 40) -> Iterator[list[int]]:
    """Bytes of each read of a payload, none longer than ``limit``."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(handle: int, parts: Sequence[memoryview], at: int) -> int:
        if len(parts) > 1 and sum(map(len, parts)) > limit:
            parts = parts[:1]
        counts.append(preadv(handle, [parts[0][:limit], *parts[1:]], at))
        return counts[-1]

    with mock.patch.object(os, "preadv", counted):
        yield counts


def test_state_that_is_not_there_yet_is_read_once_and_the_rest_twice(
    tmp_path: Path,
) -> None:
    """What nothing uses is filled by the same read that verifies it; what is in use is
    written when all is known to be good."""
    model = torch.nn.Linear(1200, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1200)).sum().backward()
    optimizer.step()
    save(tmp_path / "run", model, optimizer)
    size = 4 * 1200 * 1000

    with preads() as fresh:
        load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with preads() as again:
        load(tmp_path, model, optimizer)

    assert size > BLOCK
    assert 4 * size <= sum(fresh) < 4 * size + BLOCK
    assert 6 * size <= sum(again) < 6 * size + BLOCK


def test_neighbours_are_read_by_one_call(tmp_path: Path) -> None:
    """However many small parameters there are."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(200)))
    save(tmp_path / "run", model)

    with preads() as counts:
        load(tmp_path, model)

    assert len(counts) < 10


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


def test_a_damaged_checkpoint_gives_an_optimizer_no_state(tmp_path: Path) -> None:
    """What was read into new memory before the damage was found is forgotten."""
    model = make("plain")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer)
    file = tmp_path / "run" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    fresh = optimizer_of(model)
    before = everything(model, fresh)

    text = message_of(lambda: load(tmp_path, model, fresh))

    assert "another checksum" in text
    assert not fresh.state
    assert same(everything(model, fresh), before)
