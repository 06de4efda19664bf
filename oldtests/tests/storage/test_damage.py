"""Claims on damaged checkpoints: refused before anything changes, and why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from composable_fsdp import load, save, verify
from composable_fsdp.storage import open_source
from composable_fsdp.storage.manifest import Span
from composable_fsdp.storage.native import NativeSource
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def save_once(world: World, folder: Path) -> None:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(folder / "run", model, optimizer, {"note": "x"})


def load_damaged(world: World, folder: Path) -> str:
    model = make("wrapper", seed=2)
    optimizer = optimizer_of(model)
    step(model, optimizer, 3)
    torch.manual_seed(5)
    before, random = everything(model, optimizer), torch.get_rng_state()
    text = message_of(lambda: load(folder, model, optimizer))
    assert same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)
    return text


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


@pytest.mark.few(5)
@pytest.mark.req("X-18", "X-19")
@pytest.mark.parametrize("name", BREAK)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(
    ranks: RankCount, name: str, tmp_path: Path
) -> None:
    """The same error on every rank names the file; model, optimizer and random state
    stay; ``verify`` says the same."""
    ranks(2).run(save_once, tmp_path)
    damage, expected = BREAK[name]
    damage(tmp_path / "run")

    texts = ranks(2).run(load_damaged, tmp_path)

    assert texts[0] == texts[1]
    assert texts[0].startswith("CheckpointError: ")
    assert expected in texts[0]
    found = verify(tmp_path / "run")
    assert not found
    if "manifest" not in name:
        assert expected in str(found)


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
