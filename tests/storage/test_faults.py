"""Saves and loads that fail, and damaged checkpoints: one outcome on all ranks."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composable_fsdp import SaveOptions, async_save, checkpoints, load, save, verify
from composable_fsdp.comm import agreement
from composable_fsdp.comm.meshes import private_group
from composable_fsdp.storage import export_safetensors, open_source
from composable_fsdp.storage.manifest import Span
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.source import Copy
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


@contextmanager
def full_disk(here: bool = True, limit: int = 8192) -> Iterator[None]:
    """No file grows beyond ``limit``: Python ignores the signal, so writes fail.

    All ranks enter. The groups of saves are made first, and the ranks do not meet,
    because they would meet through a file, which would be full, too.
    """
    if torch.distributed.is_initialized():
        everyone = tuple(range(torch.distributed.get_world_size()))
        for purpose in ("checkpoint", "asynchronous checkpoint"):
            private_group(everyone, purpose)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with mock.patch.dict(os.environ, {agreement.TIMEOUT_VARIABLE: "0"}):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextmanager
def no_rename() -> Iterator[None]:
    """The directory has no room for the name of the manifest."""
    error = OSError(errno.ENOSPC, "No space left on device", "the new name")
    with mock.patch("os.replace", side_effect=error):
        yield


@contextmanager
def no_manifest() -> Iterator[None]:
    """The disk is full when all shards are written."""
    error = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch(
        "composable_fsdp.storage.directory.write_synced", side_effect=error
    ):
        yield


FAULTS: dict[str, Callable[[World], Any]] = {
    "On rank 1: the checkpoint could not be accessed: File too": (
        lambda world: full_disk(world.rank == 1)
    ),
    "On rank 0: the checkpoint could not be accessed: File too": (
        lambda world: full_disk()
    ),
    "On rank 0: the checkpoint could not be accessed": lambda world: no_manifest(),
    "No space left on device (the new name)": lambda world: no_rename(),
}


def check_faults(world: World, folder: Path) -> list[str]:
    model, texts = make("composable"), []
    optimizer = optimizer_of(model)
    save(folder / "step-1", model, optimizer)
    for at, fault in enumerate(FAULTS.values()):
        step(model, optimizer, 2 * at)
        name = folder / f"step-{at + 2}"
        world.barrier()
        with fault(world):
            texts.append(message_of(partial(save, name, model, optimizer)))
            world.barrier()
            assert not name.exists()
            world.barrier()
        step(model, optimizer, 2 * at + 1)
        save(name, model, optimizer)
        again = make("wrapper", seed=5)
        other = optimizer_of(again)
        load(folder, again, other)
        assert same(everything(model, optimizer), everything(again, other))
    return texts


@pytest.mark.req("X-22", "X-23")
def test_a_fault_on_one_rank_is_the_same_error_on_all(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Nothing is committed or left over, training and the next save go on."""
    first, second = ranks(2).run(check_faults, tmp_path)

    assert first == second
    for text, expected in zip(first, FAULTS, strict=True):
        assert text.startswith("CheckpointError: ")
        assert expected in text
    assert sorted(os.listdir(tmp_path)) == [f"step-{at}" for at in range(1, 6)]
    assert all(each.is_whole for each in checkpoints(tmp_path))


def check_bad_path(world: World, path: Path) -> str:
    model = make("composable")
    text = message_of(lambda: save(path, model))
    step(model, optimizer_of(model), 0)
    return text


@pytest.mark.req("X-23")
def test_a_path_that_cannot_be_written_is_the_same_error_on_all(
    ranks: RankCount, tmp_path: Path
) -> None:
    """A file in the path's place or above it, and a directory nobody may write."""
    (tmp_path / "file").write_text("mine")

    for path, expected in [
        (tmp_path / "file", "file exists already and is no directory"),
        (tmp_path / "file" / "step-1", "cannot be made (File exists: "),
        (Path("/proc/step-1"), "cannot be made ("),
    ]:
        texts = ranks(2).run(check_bad_path, path)
        assert texts[0] == texts[1]
        assert expected in texts[0]
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def load_by_rank(world: World, folder: Path) -> tuple[str, bool]:
    model = make("composable")
    optimizer = optimizer_of(model)
    save(folder / "step-1", model, optimizer)
    step(model, optimizer, 0)
    save(folder / "step-2", model, optimizer)
    step(model, optimizer, 1)
    before = everything(model, optimizer)
    mine = folder / f"step-{world.rank + 1}"
    text = message_of(lambda: load(mine, model, optimizer))
    return text, same(everything(model, optimizer), before)


def test_ranks_that_open_different_checkpoints_load_none(
    ranks: RankCount, tmp_path: Path
) -> None:
    """As when each looks for the newest while a save commits: a mix would be silent."""
    first, second = ranks(2).run(load_by_rank, tmp_path)

    assert first == second
    assert first[1]
    assert f"rank 0 {tmp_path}/step-1, rank 1 {tmp_path}/step-2. Nothing" in first[0]


def check_late_fault(world: World, folder: Path) -> tuple[str, bool]:
    model = make("composable")
    optimizer = optimizer_of(model)
    save(folder / "run", model, optimizer)
    finish = NativeSource.finish

    def half(source: NativeSource, copies: Sequence[Copy]) -> None:
        finish(source, copies)
        if world.rank:
            raise OSError(errno.EIO, "Input/output error", "a shard")

    with mock.patch.object(NativeSource, "finish", half):
        text = message_of(lambda: load(folder, model, optimizer))
    load(folder, model, optimizer)
    return text, bool(torch.isfinite(torch.tensor(step(model, optimizer, 0))))


def test_a_fault_after_the_ranks_agreed_is_raised_on_all(
    ranks: RankCount, tmp_path: Path
) -> None:
    """No rank trains on while another has half of the checkpoint."""
    first, second = ranks(2).run(check_late_fault, tmp_path)

    assert first == second
    assert (
        "On rank 1: load failed when a part was loaded already (OSError: " in first[0]
    )
    assert first[1]


def check_wrong_arguments(world: World, folder: Path) -> dict[str, str]:
    model, wrong = make("composable"), world.rank == 1
    save(folder / "good", model)
    module: Any = "model" if wrong else model
    path: Any = 5 if wrong else folder / "x"
    keep: Any = "2" if wrong else 2
    given: Any = {"keep": 2} if wrong else None
    calls: dict[str, Callable[[], Any]] = {
        "save expects a module, got a str": lambda: save(folder / "x", module),
        "async: save expects a module, got a str": (
            lambda: async_save(folder / "x", module)
        ),
        "load expects a module, got a str": lambda: load(folder / "good", module),
        "save expects a path, got 5": lambda: save(path, model),
        "load expects a path, got 5": (
            lambda: load(5 if wrong else folder / "good", model)  # type: ignore[arg-type]
        ),
        "save expects keep=None or a number from 1, got '2'": (
            lambda: save(folder / "x", model, options=SaveOptions(keep=keep))
        ),
        "save expects options=SaveOptions(..), got {'keep': 2}": (
            lambda: save(folder / "y", model, options=given)
        ),
        "load expects options=LoadOptions(..), got {'keep': 2}": (
            lambda: load(folder / "good", model, options=given)
        ),
        "export_safetensors expects a path, got 5": (
            lambda: export_safetensors(path, model)
        ),
    }
    texts = {expected: message_of(call) for expected, call in calls.items()}
    save(folder / "after", model)
    return texts


@pytest.mark.req("X-22")
def test_a_wrong_argument_on_one_rank_is_raised_on_all(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The rank that was called wrongly says so to the others, which do not wait on."""
    first, second = ranks(2).run(check_wrong_arguments, tmp_path, timeout=20)

    assert first == second
    for expected, text in first.items():
        assert text.startswith("TypeError: On rank 1: ")
        assert expected.removeprefix("async: ") in text
    assert sorted(os.listdir(tmp_path)) == ["after", "good"]


def save_once(world: World, folder: Path) -> None:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(folder / "run", model, optimizer, {"note": "x"})


def load_damaged(world: World, folder: Path) -> dict[str, str]:
    model = make("wrapper", seed=2)
    optimizer = optimizer_of(model)
    step(model, optimizer, 3)
    texts = {}
    for name in BREAK:
        torch.manual_seed(5)
        before, random = everything(model, optimizer), torch.get_rng_state()
        texts[name] = message_of(partial(load, folder / name / "run", model, optimizer))
        assert same(everything(model, optimizer), before)
        assert torch.equal(torch.get_rng_state(), random)
    return texts


def flip(file: Path, at: int) -> None:
    """Turn one bit of byte ``at``."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def put_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


SHARD = "rank00001.safetensors"
BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda run: os.truncate(run / SHARD, 2000),
        f"{SHARD} has 2000 bytes",
    ),
    "missing": (lambda run: (run / SHARD).unlink(), f"{SHARD} cannot be opened"),
    "empty manifest": (
        lambda run: os.truncate(run / "manifest.json", 0),
        "manifest.json (0 bytes) has another checksum",
    ),
    "no manifest": (
        lambda run: (run / "manifest.json").unlink(),
        "holds rank00000.safetensors",
    ),
    "a link": (lambda run: put_link(run / SHARD), f"{SHARD} cannot be opened"),
    "a pipe": (
        lambda run: put_pipe(run / SHARD),
        f"{SHARD} is no regular file",
    ),
    "flipped in the manifest": (
        lambda run: flip(run / "manifest.json", 300),
        "has another checksum than it says",
    ),
    "flipped in the manifest's checksum": (
        lambda run: flip(run / "manifest.json", 12),
        "has another checksum than it says",
    ),
    "flipped in the header": (
        lambda run: flip(run / SHARD, 40),
        f"{SHARD}: the header has another checksum",
    ),
}


@pytest.mark.req("X-18", "X-19")
def test_a_damaged_checkpoint_is_refused_before_anything_changes(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The same error on every rank names the file; model, optimizer and random state
    stay; ``verify`` says the same."""
    ranks(2).run(save_once, tmp_path)
    for name, (damage, _) in BREAK.items():
        shutil.copytree(tmp_path / "run", tmp_path / "damaged" / name / "run")
        damage(tmp_path / "damaged" / name / "run")

    first, second = ranks(2).run(load_damaged, tmp_path / "damaged")

    assert first == second
    for name, (_, expected) in BREAK.items():
        assert first[name].startswith("CheckpointError: ")
        assert expected in first[name]
        found = verify(tmp_path / "damaged" / name / "run")
        assert not found
        assert "manifest" in name or expected in str(found)


@pytest.mark.req("X-19")
def test_a_flipped_byte_is_reported_with_parameter_and_box(
    ranks: RankCount, tmp_path: Path
) -> None:
    """In the second row of the second half of a weight; also in its optimizer state."""
    ranks(2).run(save_once, tmp_path)
    with NativeSource(tmp_path / "run") as source:
        runs = source._runs("gpt.blocks.0.down.weight", None, Span(0, 256))
        file = tmp_path / "run" / source.manifest.files[runs[-1].file].name
        header = source.manifest.files[runs[-1].file].header_nbytes
    flip(file, header + runs[-1].begin + 5)

    with open_source(tmp_path) as damaged:
        text = message_of(
            lambda: damaged.read_model("gpt.blocks.0.down.weight", 0, 256)
        )

    assert f"{file}: bytes 0 to " in text
    assert "have another checksum than the manifest says" in text
    assert re.search(
        r"'gpt\.blocks\.0\.down\.weight' \[offsets \(\d, \d+\) sizes", text
    )
    assert re.search(r" and \d+ more\. It was read for", text)
    (problem,) = verify(tmp_path / "run").problems
    assert re.search(r"they hold .* and \d+ more\. Use another", problem)
