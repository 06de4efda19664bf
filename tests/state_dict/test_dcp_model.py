"""SHARDED_STATE_DICT of a model, and torch.distributed.checkpoint on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import (
    ShardingStrategy,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.testing.models import TinyGPT
from composable_fsdp.testing.world import World
from tests.access.sharded import (
    RankCount,
    both_paths,
    gpt,
    several_ranks,
)
from tests.runtime.reference import PATHS, STRATEGIES, differences
from tests.state_dict.dcp_tools import (
    Payload,
    load_sending_nothing,
    save_sending_nothing,
    sharded,
)

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


def check_values(world: World, path: str) -> None:
    model = gpt(path, tied_head=True)
    full = model.state_dict()
    with record() as calls:
        saved = sharded(model)

    assert calls == []
    assert list(saved) == list(full)
    assert saved["tokens.weight"] is saved["head.weight"]
    for name, value in saved.items():
        assert isinstance(value, ShardedValue)
        assert (value.shape, value.dtype) == (full[name].shape, full[name].dtype)
        assert len(value.boxes) <= 1  # rows are not cut
        part = full[name].reshape(-1)[value.start : value.stop]
        assert torch.equal(value.local.reshape(-1), part)


@pytest.mark.req("S1-32")
@several_ranks
@both_paths
def test_sharded_values_are_this_ranks_rows_under_the_plain_names(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """Shape and dtype of the whole, memory of the part, one box each, nothing sent."""
    ranks(world_size).run(check_values, path)


def save(world: World, path: str, folder: Path, strategy: ShardingStrategy) -> None:
    saved = sharded(gpt(path, seed=3, strategy=strategy))
    save_sending_nothing({"model": saved}, folder)


def load(world: World, folder: Path, strategy: ShardingStrategy) -> None:
    expected = TinyGPT(seed=3).state_dict()
    for path in PATHS:
        model = gpt(path, seed=5, strategy=strategy)
        state = {"model": sharded(model)}
        load_sending_nothing(state, folder)
        with record() as calls:
            model.load_state_dict(state["model"])
        assert calls == []
        assert differences(model.state_dict(), expected) == {}


@pytest.mark.req("S1-32", "S1-34")
@pytest.mark.parametrize("before", [2, 3])
@every_strategy
@both_paths
def test_what_dcp_saved_on_one_path_both_load_at_any_world_size(
    ranks: RankCount, path: str, strategy: ShardingStrategy, before: int, tmp_path: Path
) -> None:
    """Bit by bit, and no tensor is sent between ranks on the way out or in."""
    ranks(before).run(save, path, tmp_path, strategy)

    for after in (1, 2, 4):
        ranks(after).run(load, tmp_path, strategy)


def test_the_payload_counter_sees_a_tensor_that_is_sent(one_rank: World) -> None:
    """Else the claims above would hold of anything."""
    with Payload() as mode:
        dist.all_reduce(torch.ones(1))

    assert mode.sent == ["c10d.allreduce_.default"]
