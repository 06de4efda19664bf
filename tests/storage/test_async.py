"""Claims on asynchronous saves: values of the call, one outcome, one at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composable_fsdp import async_save, load, remove_stale, save, verify
from composable_fsdp.comm.nodes import private_group
from composable_fsdp.storage import save as saving
from composable_fsdp.storage import writer
from composable_fsdp.storage.commit import newest_in
from tests.storage.test_faults import full_disk
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def slowly(seconds: float) -> Any:
    """Have every file take that long."""
    write_file = writer.write_file

    def write(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return write_file(*args, **options)

    return mock.patch.object(saving, "write_file", write)


def check_values(world: World, folder: Path) -> bool:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    at_call = everything(model, optimizer)
    with slowly(0.3):
        future = async_save(folder / "run", model, optimizer, {"at": 1})
        step(model, optimizer, 1)
        # So the interpreter waits for it at its exit.
        (thread,) = (t for t in threading.enumerate() if t.name.endswith("fsdp save"))
        assert not thread.daemon
        early = not future.done() and not (folder / "run" / "manifest.json").exists()
        assert future.result() is None
    again = make("wrapper", seed=2)
    other = optimizer_of(again)
    assert load(folder, again, other) == {"at": 1}
    return early and same(everything(again, other), at_call)


@pytest.mark.req("X-26")
def test_an_asynchronous_save_holds_the_values_of_the_call(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Training goes on while it is written, with collectives of its own."""
    assert ranks(2).run(check_values, tmp_path) == [True, True]
    assert verify(tmp_path)


def check_order(world: World, folder: Path) -> list[str]:
    model = make("composable")
    spans: list[tuple[float, float]] = []
    write = saving.write

    def timed(*args: Any) -> None:
        start = time.monotonic()
        write(*args)
        spans.append((start, time.monotonic()))

    with slowly(0.2), mock.patch("composable_fsdp.storage.async_save.write", timed):
        async_save(folder / "step-1", model)
        async_save(folder / "step-2", model)
        save(folder / "step-3", model)
        load(folder, model)
    assert spans[0][1] <= spans[1][0]
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.req("X-26")
def test_a_second_save_waits_for_the_first(ranks: RankCount, tmp_path: Path) -> None:
    """Asynchronous or not, and so does a load; all of them are committed."""
    for found in ranks(2).run(check_order, tmp_path):
        assert found == ["step-1", "step-2", "step-3"]
    newest = newest_in(str(tmp_path))
    assert newest is not None
    assert newest.path.endswith("step-3")


def check_failure(world: World, folder: Path) -> tuple[str, str, str]:
    model = make("composable")
    with full_disk(world.rank == 1):
        future = async_save(folder / "step-1", model)
        while not future.done():
            time.sleep(0.01)
    world.barrier()
    unseen = message_of(lambda: save(folder / "step-2", model))
    with full_disk(world.rank == 1):
        future = async_save(folder / "step-3", model)
        seen = message_of(future.result) if world.rank == 0 else ""
        while not future.done():
            time.sleep(0.01)
    world.barrier()
    return unseen, seen, message_of(lambda: save(folder / "step-4", model))


@pytest.mark.req("X-26")
def test_a_failure_surfaces_through_the_future_or_at_the_next_call(
    ranks: RankCount, tmp_path: Path
) -> None:
    """On every rank alike; once it was asked for on one, the next call goes on."""
    (first, seen, last), other = ranks(2).run(check_failure, tmp_path)

    assert first == other[0]
    assert (
        f"The asynchronous save of {tmp_path}/step-1 ended with an error. On rank 1"
        in first
    )
    assert "This call did nothing; repeat it" in first
    assert "On rank 1: the checkpoint could not be accessed: File too large" in seen
    assert last == other[2] == "nothing was raised"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-4"]


def check_destroyed(world: World, folder: Path) -> str:
    model = make("composable")
    gone = threading.Event()
    write_file = vars(saving)["write_file"]

    def late(*args: Any, **options: Any) -> Any:
        gone.wait(30)
        return write_file(*args, **options)

    with (
        mock.patch.object(saving, "write_file", late),
        # Rank 0 would tidy up, maybe before rank 1 writes.
        mock.patch.object(saving, "discard"),
    ):
        future = async_save(folder / "step-1", model)
        group = private_group((0, 1), "asynchronous checkpoint")
        torch.distributed.destroy_process_group(group)
        gone.set()
        text = message_of(future.result)
    async_save(folder / "step-2", model).result()
    return text


@pytest.mark.req("X-26")
def test_a_group_destroyed_under_a_save_ends_it_with_an_error(
    ranks: RankCount, tmp_path: Path
) -> None:
    """No rank hangs, nothing is committed, and the next save goes through."""
    for text in ranks(2).run(check_destroyed, tmp_path):
        assert text.startswith("CheckpointError: Another rank was lost, or the process")
    remove_stale(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-2"]
