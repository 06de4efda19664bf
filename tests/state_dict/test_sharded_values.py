"""``ShardedValue`` looked at: its part, its boxes, and the whole."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    Block,
    ShardingStrategy,
    StateDictType,
    optim_state_dict,
    state_dict_type,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.state_dict.dcp_tools import corners, sharded
from tests.support.on_ranks import on_ranks
from tests.support.reference import adamw
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    step,
)
from tests.support.world import World


def models(path: str) -> list[tuple[nn.Module, Any]]:
    """A GPT, and parameters of every odd shape; with elements cut on one door."""
    found: list[tuple[nn.Module, Any]] = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = gpt(path, strategy=strategy)
        found.append((model, adamw(model.parameters())))
    for block in Block if path == "composable" else (Block.ROW,):
        found.append(corners(path, block, seed=1))
    return found


@on_ranks(1, 2, 3)
@both_paths
def test_parts_boxes_and_the_whole_are_those_of_the_parameter(
    world: World, path: str
) -> None:
    """Also of copies and casts; ``full_tensor`` alone sends something."""
    for model, _ in models(path):
        full = model.state_dict()
        for name, value in sharded(model).items():
            if not isinstance(value, ShardedValue):
                continue
            assert value.to_local() is value.local
            with record() as calls:
                pieces = value.local_shards()
            assert calls == []
            for piece, box in zip(pieces, value.boxes, strict=True):
                offsets, sizes = (
                    piece.metadata.shard_offsets,
                    piece.metadata.shard_sizes,
                )
                assert (offsets, sizes) == (box.offsets, box.sizes)
                cut = tuple(
                    slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)
                )
                assert torch.equal(piece.tensor, full[name][cut]), name
            forms: tuple[Any, ...] = (value, copy.deepcopy(value), value.double())
            for each in forms:
                whole = each.full_tensor()
                assert type(whole) is torch.Tensor
                assert torch.equal(whole, full[name].to(each.dtype)), name


def look(world: World, path: str) -> list[str]:
    model = gpt(path)
    optimizer = adamw(model.parameters())
    step(model, optimizer, world.rank, 0)
    whole = optim_state_dict(model, optimizer)["state"]
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        asked = optim_state_dict(model, optimizer)["state"]
    for name, state in asked.items():
        value = state["exp_avg"]
        assert torch.equal(value.full_tensor(), whole[name]["exp_avg"]), name
    shown = optimizer.state_dict()["state"]
    mine = [i for i, p in enumerate(model.parameters()) if p.numel()]
    assert list(shown) == mine
    # Ranks hold other ones, so nobody waits for those that have none to gather.
    assert all(
        "by optim_state_dict(" in message_of(v["exp_avg"].full_tensor)
        for v in shown.values()
    )

    file = io.BytesIO()
    # Nobody asked for parts above, and those are not pickled.
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        value = next(iter(optimizer.state_dict()["state"].values()))["exp_avg"]
        torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded.to_local(), value.local)
    return [message_of(act) for act in (value.norm, value.mean, loaded.full_tensor)]


@pytest.mark.req("U-02")
@both_paths
def test_what_an_optimizer_shows_can_be_looked_at_whole_or_in_parts(
    ranks: RankCount, path: str
) -> None:
    """``norm`` and ``mean`` of a part would be this rank's: the error says what is."""
    for norm, mean, loaded in ranks(2).run(look, path):
        for text in (norm, mean):
            assert text.startswith("TypeError: ")
            assert "Use value.local for this rank's elements and value.full_t" in text
        assert "CheckpointError: full_tensor expects a value whose process gr" in loaded
        assert "that was pickled, with elements [" in loaded
