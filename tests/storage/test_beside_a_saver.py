"""Claims on a load of a directory while another job saves there and removes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import LoadOptions, load, save
from composable_fsdp.storage import load as loading
from composable_fsdp.storage import opening
from composable_fsdp.storage.source import Source
from tests.support.sharded import RankCount
from tests.support.world import World


def filled(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def check_saver(world: World, folder: Path) -> list[str]:
    """Rank 0 looks up step-1; the other job then replaces the newest by the next."""
    if world.rank == 0:
        save_alone(folder / "step-1", 1.0)
    world.barrier()
    opened: list[str] = []
    real = opening.open_source

    def late(path: Any) -> Source:
        # All ranks have rank 0's answer; the first two answers are removed.
        world.barrier()
        if world.rank == 0 and len(opened) < 2:
            save_alone(folder / f"step-{len(opened) + 2}", len(opened) + 2.0)
            shutil.rmtree(path)
        world.barrier()
        opened.append(Path(path).name)
        return real(path)

    model = filled(0.0)
    with mock.patch.object(loading, "open_source", late):
        load(folder, model, options=LoadOptions(rng=False))
    return [*opened, str(model.weight[0, 0].item())]


def save_alone(path: Path, value: float) -> None:
    """As another job, which is no part of this process group."""
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        save(path, filled(value))


@pytest.mark.req("K-03")
def test_ranks_follow_rank_0_and_look_again_if_the_newest_was_removed(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Beside a job that saves with keep=1, which removes what was just found."""
    first, second = ranks(2).run(check_saver, tmp_path)

    assert first == second == ["step-1", "step-2", "step-3", "3.0"]
