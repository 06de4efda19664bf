"""Checkpoints that an earlier commit wrote are loaded with equal values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composable_fsdp import Block, verify
from composable_fsdp.storage import open_source
from tests.goldens import checkpoints, checkpoints_cut, checkpoints_own
from tests.goldens.checkpoints import EXTRA, FOLDER, WORLD_SIZES, State, name_of
from tests.support.place import _same
from tests.support.sharded import RankCount
from tests.support.world import World

# Row blocks as they were saved, and other cuts of the same parameters.
OPTIONS: list[State] = [{}, {"block": Block.ELEMENT}]


def expected(name: str, *, drawn: bool) -> Any:
    """The values at the save, which rank 0 wrote with ``torch.save``."""
    saved = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    numbers = saved.pop("drawn")
    return {**saved, "extra": EXTRA, **({"drawn": numbers} if drawn else {})}


@pytest.mark.req("U-07", "X-24")
@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints_of_an_earlier_commit_load_with_equal_values(
    ranks: RankCount, size: int
) -> None:
    """Weights, optimizers, buffers, extra and random states, bit by bit."""
    for trained in (False, True):
        for rank, found in enumerate(ranks(size).run(load_sharded, trained)):
            for name, state in found:
                saved = expected(name, drawn=rank == 0)
                assert _same(state, saved), (name, trained, rank)


def load_sharded(world: World, trained: bool) -> list[tuple[str, State]]:
    return checkpoints.load_all(world, OPTIONS, trained=trained)


@pytest.mark.req("S3-06")
def test_checkpoints_of_an_earlier_commit_load_into_a_plain_model(
    one_rank: World,
) -> None:
    """The same without sharding."""
    found = checkpoints.load_all(one_rank, [{}], trained=False, sharded=False)

    assert [name for name, _ in found] == [name_of(size) for size in WORLD_SIZES]
    for name, state in found:
        assert _same(state, expected(name, drawn=False)), name


@pytest.mark.req("U-07", "K-01", "K-08", "K-09")
def test_values_of_ranks_of_an_earlier_commit_load_with_equal_values(
    ranks: RankCount,
) -> None:
    """Values of ranks, a parameter stored alone, all types of ``extra``."""
    folder = FOLDER / checkpoints_own.NAME
    for rank, (state, extra, own) in enumerate(ranks(2).run(checkpoints_own.load_one)):
        saved = torch.load(checkpoints_own.file_of(rank), weights_only=True)
        assert _same(state, saved)
        assert extra == checkpoints_own.EXTRA
        assert own == {"at": (rank, "b")}

    ((alone, extra, _),) = ranks(1).run(checkpoints_own.load_one)
    parts = [torch.load(checkpoints_own.file_of(r), weights_only=True) for r in (0, 1)]
    whole = torch.cat([part["values"]["body.weight"].flatten() for part in parts])
    assert torch.equal(alone["values"]["body.weight"].flatten(), whole)
    assert _same(alone["values"]["expert.weight"], parts[0]["values"]["expert.weight"])
    assert verify(folder)
    with open_source(folder) as source:
        assert source.local_ranks == source.saved_ranks == 2
        assert checkpoints_own.LEFT_OUT not in source.model


@pytest.mark.req("M-01", "K-02")
def test_columns_of_an_earlier_commit_load_with_equal_values(ranks: RankCount) -> None:
    """Columns that were cut, on every mesh and on none; a tensor that wraps another."""
    folder = FOLDER / checkpoints_cut.NAME
    saved = torch.load(FOLDER / f"{checkpoints_cut.NAME}.pt", weights_only=True)

    for dp in (1, 2, 4):
        for found in ranks(4).run(checkpoints_cut.load_one, dp):
            assert _same(found, saved)
    (alone,) = ranks(1).run(checkpoints_cut.load_one, 0)
    assert _same(alone, saved)
    assert verify(folder)
    with open_source(folder) as source:
        assert set(source.wrappers) == {"table"}
