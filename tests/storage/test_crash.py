"""Claims on saves that are killed: the old checkpoint stays, the new is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from composable_fsdp import (
    async_save,
    checkpoints,
    load,
    remove_stale,
    save,
    verify,
)
from composable_fsdp.storage.commit import newest_in
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.crash import POINTS, killed_at
from tests.support.sharded import RankCount, message_of
from tests.support.world import RankFailure, World


def save_and_die(world: World, folder: Path, point: str, behind: bool) -> None:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    with killed_at(point, world.rank):
        if behind:
            async_save(folder / "step-2", model, optimizer).result()
        else:
            save(folder / "step-2", model, optimizer)


def save_first(world: World, folder: Path) -> dict[str, Any]:
    model = make("composable")
    optimizer = optimizer_of(model)
    save(folder / "step-1", model, optimizer)
    return everything(model, optimizer)


def killed(ranks: RankCount, folder: Path, point: str, behind: bool = False) -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(2).run(save_and_die, folder, point, behind)


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.few(4)
@pytest.mark.req("X-04")
@pytest.mark.parametrize("point", [*POINTS, "mid-file:1", "mid-file in thread"])
def test_a_killed_save_leaves_the_old_checkpoint_whole(
    ranks: RankCount, point: str, tmp_path: Path
) -> None:
    """Killed at any point: the old one loads, the new one is there whole or not."""
    before = ranks(2).run(save_first, tmp_path)[0]
    old = bytes_below(tmp_path / "step-1")

    killed(ranks, tmp_path, point.split()[0], behind="thread" in point)

    done = point == "after-rename"
    assert bytes_below(tmp_path / "step-1") == old
    assert bool(verify(tmp_path / "step-2")) == done
    stale = remove_stale(tmp_path, dry_run=True)
    # A rank that outlives the other one tidies up.
    assert len(stale) == (0 if done or point == "before-write" else 1) or (
        point == "mid-file:1"
    )
    assert remove_stale(tmp_path) == stale
    left = sorted(os.listdir(tmp_path))
    # Before the first byte, the directory is empty, and nobody's.
    assert left == ["step-1", *["step-2"] * (done or point == "before-write")]
    model = make("plain", seed=4)
    optimizer = optimizer_of(model)
    load(tmp_path, model, optimizer)
    assert same(everything(model, optimizer), before) != done
    save(tmp_path / "step-3", model)
    assert [each.step for each in checkpoints(tmp_path)] == [1, *[2] * done, 3]
    newest = newest_in(str(tmp_path))
    assert newest is not None
    assert newest.path.endswith("step-3")


def save_again(world: World, folder: Path, point: str) -> str:
    with killed_at(point, world.rank):
        return message_of(lambda: save(folder / "step-1", make("wrapper", seed=3)))


@pytest.mark.req("X-05", "D-18")
def test_an_existing_name_is_never_written_over(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Refused before a byte is written, so no crash can mix old and new files."""
    ranks(2).run(save_first, tmp_path)
    old = bytes_below(tmp_path / "step-1")

    for point in ("", *POINTS):
        for text in ranks(2).run(save_again, tmp_path, point):
            assert "step-1 exists already, and nothing is overwritten" in text

    assert bytes_below(tmp_path / "step-1") == old
    assert sorted(os.listdir(tmp_path)) == ["step-1"]
