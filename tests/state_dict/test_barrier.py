"""A full state dict that one rank alone asks for ends in a message."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from composable_fsdp import (
    StateDictType,
    fully_shard,
    set_state_dict_type,
    unshard_params,
)
from composable_fsdp.comm import agreement
from tests.support.models import tiny_mlp
from tests.support.sharded import RankCount, gpt, message_of
from tests.support.world import RankFailure, World


def first_rank_alone(world: World) -> None:
    model = gpt("composable")
    if world.rank == 0:
        os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"  # nobody will come
        model.state_dict()


@pytest.mark.req("X-12", "U-02")
def test_a_state_dict_on_one_rank_alone_is_an_error_that_says_so(
    ranks: RankCount,
) -> None:
    """``if rank == 0: model.state_dict()``, before it sends anything."""
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(first_rank_alone, timeout=20, patience=10)

    text = str(caught.value)
    assert "DesyncError: state_dict() of TinyGPT was called on this rank" in text
    assert "rank 1 did not come within 0.2 s" in text
    assert "call state_dict() on every rank" in text


def shards_of_one_rank(world: World) -> bool:
    model = fully_shard(tiny_mlp())
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    if world.rank == 0:
        model.state_dict()
    model(torch.ones(2, 8)).sum().backward()
    return True


def test_sharded_values_need_no_other_rank(ranks: RankCount) -> None:
    """Nothing is gathered for them, so nobody is waited for."""
    assert ranks(2).run(shards_of_one_rank) == [True, True]


def on_one_rank_inside_of_a_block(world: World) -> list[list[str]]:
    model = nn.Sequential(fully_shard(nn.Linear(4, 2)), fully_shard(nn.Linear(2, 4)))
    fully_shard(model)
    found = []
    for options in ({}, {"offload_to_cpu": True}):
        with unshard_params(model, writeback=False, **options):
            if world.rank == 0:
                found.append([str(tuple(v.shape)) for v in model.state_dict().values()])
    return found


def test_inside_of_a_block_one_rank_alone_may_ask(ranks: RankCount) -> None:
    """Full values are there already, also below a root without parameters."""
    found, nothing = ranks(2).run(on_one_rank_inside_of_a_block)

    assert found == [["(2, 4)", "(2,)", "(4, 2)", "(4,)"]] * 2
    assert nothing == []


def inside_of_a_block_of_the_first_rank(world: World) -> str:
    model = fully_shard(tiny_mlp())
    os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"
    with unshard_params(model, rank0_only=True, writeback=False):
        text = message_of(model.state_dict)
    del os.environ[agreement.TIMEOUT_VARIABLE]
    return text


def test_a_block_of_the_first_rank_alone_is_no_place_to_meet(ranks: RankCount) -> None:
    """There every rank refuses at once, the others as the first."""
    texts = ranks(2).run(inside_of_a_block_of_the_first_rank)

    assert all("was called inside unshard_params(rank0_only=True)" in t for t in texts)
