"""Claims on the memory of asynchronous saves: reused, one copy, told beforehand."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CustomPolicy,
    async_save,
    free_save_memory,
    load,
    open_source,
    plan,
)
from composable_fsdp.inspection.plan_report import report_of
from composable_fsdp.inspection.plan_text import parts_of, plain_text
from composable_fsdp.naming import size_text
from composable_fsdp.storage import async_save as snapshot
from composable_fsdp.storage import save as saving
from composable_fsdp.storage import staging, writer
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.tools.forecast import forecast
from tests.storage.test_faults import full_disk
from tests.storage.training import Saved, everything, make, optimizer_of, same, step
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

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


def check_reuse(world: World, folder: Path) -> list[bool]:
    model = make("composable")
    optimizer = optimizer_of(model)
    allocate = mock.Mock(wraps=staging.host_buffer)
    found, places = [], set()
    with mock.patch.object(snapshot, "host_buffer", allocate):
        for at in range(3):
            step(model, optimizer, at)
            expected = everything(model, optimizer)
            future = async_save(folder / f"step-{at}", model, optimizer)
            spoil(model, optimizer)
            future.result()
            places.add(address_of(model))
            load(folder, model, optimizer)
            found.append(same(everything(model, optimizer), expected))
    return [*found, allocate.call_count == 1, len(places) == 1]


@pytest.mark.req("K-06")
def test_saves_share_memory_and_hold_the_values_of_their_call(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Three saves allocate once, and training overwrites everything after each call."""
    assert ranks(2).run(check_reuse, tmp_path) == [[True] * 5] * 2


def check_size(world: World, folder: Path) -> tuple[int, int]:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    async_save(folder / "run", model, optimizer).result()
    with NativeSource(folder / "run") as source:
        written = source.manifest.files[world.rank].payload_nbytes
    return free_save_memory(model), written


@pytest.mark.req("K-06", "U-03")
@pytest.mark.parametrize("world_size", [1, 2, 3])
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
    lines = plain_text(parts_of(report)).splitlines()
    assert f"async_save holds {size_text(told)} of host memory per rank." in lines


class Odd(nn.Module):
    """Tensors whose memory is not what they represent, and of every size of element."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.short = nn.Parameter(torch.arange(5.0).bfloat16())
        wave = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
        self.register_buffer("conjugate", wave.conj())
        self.register_buffer("negated", wave.conj().imag)
        self.register_buffer("few", torch.arange(100.0)[::7])
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("small", torch.tensor([1.5, -2.0]).to(torch.float8_e5m2))
        self.register_buffer("none", torch.empty(0, 4))


@pytest.mark.req("K-06")
def test_tensors_are_copied_by_value_whatever_their_memory_is(tmp_path: Path) -> None:
    """Lazy conjugates, strides, empty tensors and one-byte elements come back."""
    model = Odd()
    expected = {k: v.clone() for k, v in model.state_dict().items()}

    future = async_save(tmp_path / "run", model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    future.result()

    with open_source(tmp_path / "run") as source:
        for name, value in expected.items():
            found = source.read_model(name, 0, value.numel()).view(value.shape)
            assert torch.equal(bits(found), bits(value)), name


def bits(value: Tensor) -> Tensor:
    """The bytes of the values."""
    plain = value.resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8)


def check_failure(world: World, folder: Path) -> list[Any]:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    with full_disk(world.rank == 1):
        text = message_of(async_save(folder / "step-1", model, optimizer).result)
    first = address_of(model)
    step(model, optimizer, 1)
    expected = everything(model, optimizer)
    future = async_save(folder / "step-2", model, optimizer)
    spoil(model, optimizer)
    future.result()
    load(folder, model, optimizer)
    good = same(everything(model, optimizer), expected)
    return [text.split(":")[0], address_of(model) == first, good]


@pytest.mark.req("K-06")
def test_after_an_error_of_the_writer_the_memory_is_used_again(
    ranks: RankCount, tmp_path: Path
) -> None:
    """A full disk on rank 1 leaves both ranks with memory for the next save."""
    for found in ranks(2).run(check_failure, tmp_path):
        assert found == ["CheckpointError", True, True]


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let no file be written before the event is set."""
    go, write_file = threading.Event(), writer.write_file

    def late(*args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return write_file(*args, **options)

    with mock.patch.object(saving, "write_file", late):
        yield go


@pytest.mark.req("K-06")
def test_memory_that_is_freed_in_a_save_stays_until_the_file_is_written(
    tmp_path: Path,
) -> None:
    """The checkpoint is right; afterwards nothing keeps the memory."""
    model = nn.Linear(64, 64)
    expected = model.weight.detach().clone()
    with held_back() as go:
        future = async_save(tmp_path / "run", model)
        memory = weakref.ref(snapshot._memories[model])
        nbytes = free_save_memory(model)
        kept = memory() is not None
        nn.init.zeros_(model.weight)
        go.set()
        future.result()
    threads = [t for t in threading.enumerate() if t.name == "composable_fsdp save"]
    for thread in threads:
        thread.join()
    load(tmp_path / "run", model)

    assert nbytes >= 64 * 65 * 4
    assert free_save_memory(model) == 0
    assert kept
    assert memory() is None
    assert torch.equal(model.weight, expected)


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


def test_memory_grows_and_never_holds_two_copies() -> None:
    """A larger save gets a new buffer after the old one is gone; a smaller one none."""
    memory = snapshot.SaveMemory()
    first = memory.reserve(100, pinned=False).data_ptr()

    assert memory.reserve(60, pinned=False).data_ptr() == first
    with mock.patch.object(snapshot, "host_buffer") as allocate:
        allocate.side_effect = lambda *_, **__: [memory.buffer]
        found: Any = memory.reserve(200, pinned=False)
    assert found == [None]


@pytest.mark.parametrize("code", [0, 1])
def test_pinned_memory_is_registered_until_it_is_unmapped(code: int) -> None:
    """Exactly the bytes asked for; a refusal is told, and the memory is usable."""
    calls: list[tuple[str, int]] = []

    def register(at: int, nbytes: int, flags: int) -> int:
        calls.append(("on", at))
        return code

    def unregister(at: int) -> int:
        calls.append(("off", at))
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    with mock.patch.object(staging, "_cudart", return_value=cudart):
        if code:
            with pytest.warns(UserWarning, match=r"refused to pin 5000 bytes .*ulimit"):
                buffer = staging.host_buffer(5000, pinned=True)
        else:
            buffer = staging.host_buffer(5000, pinned=True)
        buffer.fill_(3)
        at = buffer.data_ptr()
        assert calls == [("on", at)]
        assert buffer.numel() == 5000
        part = buffer[100:]
        del buffer
        assert calls == [("on", at)]
        del part
        gc.collect()
    assert calls == ([("on", at)] if code else [("on", at), ("off", at)])


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 8 << 20), ("6000000", 3_900_000), (None, 8 << 20)]
)
def test_free_memory_is_that_of_the_container(
    tmp_path: Path, limit: str | None, free: int
) -> None:
    """A container's page cache is free memory; half of it is shared by the ranks."""
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 8192 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("4000000")
        stat = "anon 2100000\nactive_file 1500000\ninactive_file 400000\n"
        (tmp_path / "memory.stat").write_text(stat)
    with (
        mock.patch.object(staging, "_CGROUP", tmp_path),
        mock.patch.object(staging, "_MEMINFO", tmp_path / "meminfo"),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
    ):
        assert staging.fits_in_memory(free // 4)
        assert not staging.fits_in_memory(free // 4 + 1)
