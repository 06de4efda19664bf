"""Asynchronous saves, and replicas that divide the bytes of a save."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import (
    CustomPolicy,
    LoadOptions,
    ShardingStrategy,
    async_save,
    load,
    plan,
    save,
    verify,
)
from composable_fsdp.comm.meshes import private_group
from composable_fsdp.naming import size_text
from composable_fsdp.storage import (
    free_save_memory,
    part,
    remove_stale,
    save_parts,
    writer,
)
from composable_fsdp.storage import save as saving
from composable_fsdp.storage import save as snapshot
from composable_fsdp.storage.commit import newest_in
from composable_fsdp.storage.contents import contents_of
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.tools.plan_report import report_of, text_of
from composable_fsdp.tools.sharding_plan import forecast
from tests.storage.test_faults import full_disk
from tests.storage.training import Saved, everything, make, optimizer_of, same, step
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def slowly(seconds: float) -> Any:
    """Have every file take that long."""
    write_file = writer.write_file

    def write(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return write_file(*args, **options)

    return mock.patch.object(saving, "write_file", write)


def check_order(world: World, folder: Path) -> list[str]:
    model = make("composable")
    spans: list[tuple[float, float]] = []
    write = saving.write

    def timed(*args: Any) -> None:
        start = time.monotonic()
        write(*args)
        spans.append((start, time.monotonic()))

    with slowly(0.2), mock.patch("composable_fsdp.storage.save.write", timed):
        async_save(folder / "step-1", model)
        # The interpreter waits for it at its exit.
        (thread,) = (t for t in threading.enumerate() if t.name.endswith("fsdp save"))
        assert not thread.daemon
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


def failures(world: World, folder: Path) -> tuple[str, str, str]:
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


def check_failure(world: World, folder: Path) -> tuple[str, str, str]:
    with mock.patch.object(vars(saving)["_log"], "error") as log:
        told = failures(world, folder)
    # There may be no next call.
    assert log.call_count == 2
    return told


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


# Scalar states, random states and tensors in no unit, which no plan knows.
BESIDE = 24 * 1024


def address_of(model: nn.Module) -> int:
    """Where the memory of the model's saves begins."""
    buffer = snapshot._memories[model].buffer
    assert buffer is not None
    return buffer.data_ptr()


def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Overwrite whatever a checkpoint holds, as training would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7)
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(-7)


@pytest.mark.req("K-06")
@on_ranks(2)
def test_saves_share_memory_and_hold_the_values_of_their_call(
    world: World, tmp_path: Path
) -> None:
    """Three saves allocate once, and training overwrites everything after each call."""
    model = make("composable")
    optimizer = optimizer_of(model)
    allocate = mock.Mock(wraps=writer.host_buffer)
    found, places = [], set()
    with mock.patch.object(snapshot, "host_buffer", allocate):
        for at in range(3):
            step(model, optimizer, at)
            expected = everything(model, optimizer)
            future = async_save(tmp_path / f"step-{at}", model, optimizer)
            spoil(model, optimizer)
            future.result()
            places.add(address_of(model))
            load(tmp_path, model, optimizer)
            found.append(same(everything(model, optimizer), expected))

    assert [*found, allocate.call_count == 1, len(places) == 1] == [True] * 5


def check_size(world: World, folder: Path) -> tuple[int, int]:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    async_save(folder / "run", model, optimizer).result()
    with NativeSource(folder / "run") as source:
        written = source.manifest.files[world.rank].payload_nbytes
    return free_save_memory(model), written


@pytest.mark.req("K-06", "U-03")
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_memory_is_one_copy_and_the_plan_tells_it(
    ranks: RankCount, tmp_path: Path, world_size: int
) -> None:
    """No byte more than the rank's file has, nor than the plan says for the units."""
    found = ranks(world_size).run(check_size, tmp_path)

    model = Saved()
    blocks = list(model.gpt.blocks)
    policy = CustomPolicy(lambda module: any(module is block for block in blocks))
    planned = plan(model, world_size=world_size, policy=policy)
    told = planned.save_bytes(optimizer_states=2)
    for held, written in found:
        assert held <= written
        assert held <= told + BESIDE
        # And not much less: the figure is to plan with.
        assert held >= told * 0.8
    expected = forecast(planned, optimizer="adamw")
    assert expected.save_bytes == told
    report = report_of(expected, source="", units_from="")
    lines = text_of(report).splitlines()
    assert f"async_save holds {size_text(told)} of host memory per rank." in lines


@pytest.mark.req("K-06")
def test_memory_is_freed_with_the_module(tmp_path: Path) -> None:
    """The package keeps neither the module nor the copy of its values alive."""
    model = nn.Linear(8, 8)
    async_save(tmp_path / "run", model).result()
    buffer = snapshot._memories[model].buffer
    assert buffer is not None
    owner = snapshot._memories[model]
    held = weakref.ref(owner)
    alive = weakref.ref(model)

    del model, buffer, owner
    gc.collect()

    assert alive() is None
    assert held() is None


@contextmanager
def small_parts(nbytes: int = 16) -> Iterator[None]:
    """Divide even small shards, and tensors in no unit."""
    with (
        mock.patch.object(save_parts, "SMALLEST_PART", nbytes),
        mock.patch.object(part, "SMALL", nbytes),
    ):
        yield


def hybrid(replicas: int, shards: int) -> Any:
    """A mesh of so many replicas of so many shards."""
    return torch.distributed.device_mesh.init_device_mesh(
        "cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")
    )


def options_of(mesh: tuple[int, int]) -> dict[str, Any]:
    """The options of a model on a mesh; with a single shard, those of ``NO_SHARD``."""
    if mesh[1] == 1:
        return {"strategy": ShardingStrategy.NO_SHARD}
    return {"device_mesh": hybrid(*mesh)}


def check_save(world: World, folder: Path, mesh: tuple[int, int]) -> list[Any]:
    with small_parts():
        model = make("composable", **options_of(mesh))
        optimizer = optimizer_of(model)
        for at in range(2):
            step(model, optimizer, at)
        save(folder / "step-1", model, optimizer)
        async_save(folder / "step-2", model, optimizer).result()
    return [everything(model, optimizer), free_save_memory(model)]


def check_load(world: World, name: Path, expected: Any) -> bool:
    model = make("wrapper", seed=5)
    optimizer = optimizer_of(model)
    load(name, model, optimizer, options=LoadOptions(rng=False))
    return same(everything(model, optimizer), expected)


MESHES = [(2, 2), (3, 1)]


@pytest.mark.few(1)
@pytest.mark.req("K-05", "S3-06")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replicas_divide_the_bytes_and_any_world_reads_them(
    ranks: RankCount, tmp_path: Path, mesh: tuple[int, int]
) -> None:
    """Both saves come back on one to three ranks, and no rank writes the most of it."""
    found = ranks(mesh[0] * mesh[1]).run(check_save, tmp_path, mesh)
    expected = found[0][0]

    assert all(same(saved, expected) for saved, _ in found)
    for name in ("step-1", "step-2"):
        assert verify(tmp_path / name)
        with NativeSource(tmp_path / name) as source:
            sizes = [file.payload_nbytes for file in source.manifest.files]
            tensors = source.manifest.tensors
            writers = {len({at.file for at in each.parts}) for each in tensors}
        # Random states are on every rank: 20 KiB.
        own = [size - 20_000 for size in sizes]
        assert max(own) < 1.25 * min(own)
        # Large parameters are cut.
        assert mesh[0] * mesh[1] in writers
    for world_size, name in ((1, "step-1"), (2, "step-2"), (3, "step-1")):
        again = ranks(world_size).run(check_load, tmp_path / name, expected)
        assert again == [True] * world_size


def check_plain(world: World, folder: Path) -> list[Any]:
    model = make("plain")
    optimizer = optimizer_of(model)
    with small_parts():
        step(model, optimizer, 0)
        save(folder / "run", model, optimizer)
        with torch.no_grad():
            model.get_parameter("scale").add_(world.rank)
        text = message_of(lambda: save(folder / "unequal", model, optimizer))
        with torch.no_grad():
            model.get_parameter("scale").sub_(world.rank)
    return [everything(model, optimizer), text]


@pytest.mark.req("K-01", "K-05")
def test_large_parameters_in_no_unit_are_divided(
    ranks: RankCount, tmp_path: Path
) -> None:
    """In the order of the model; values that differ are refused as ever."""
    found = ranks(2).run(check_plain, tmp_path)

    expected, text = found[0]
    assert "'scale'" in text
    with NativeSource(tmp_path / "run") as source:
        tensors = source.manifest.tensors
        sizes = [file.payload_nbytes for file in source.manifest.files]
    buffers = [each for each in tensors if each.fqns == ("seen",)]
    assert [each.parts[0].file for each in buffers] == [0]
    assert [each.fqns for each in tensors] == expected_names()
    assert max(sizes) < 1.3 * min(sizes)
    assert ranks(2).run(check_load, tmp_path / "run", expected) == [True] * 2


def expected_names() -> list[tuple[str, ...]]:
    """The names of a plain model's tensors as one rank saves them."""
    return [held.names for held in contents_of(make("plain"), "save").tensors]
