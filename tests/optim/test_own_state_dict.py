"""``optimizer.state_dict()`` in a file that one rank writes, as frameworks do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    ShardingStrategy,
    StateDictType,
    flat_parameters,
    optim_state_dict,
    state_dict_type,
)
from tests.support.models import tiny_mlp
from tests.support.reference import adamw, apply_units, loss_of, wide_input
from tests.support.sharded import RankCount, both_paths, message_of
from tests.support.world import World

State = dict[str, Any]


def stepped(
    world: World, path: str, *, flat: bool = False, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = apply_units(tiny_mlp(), [], path=path, **options)
    optimizer = adamw(flat_parameters(model) if flat else model.parameters())
    loss_of(model, wide_input(8)(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return model, optimizer


def written(state: State) -> str:
    """What writing it raises."""
    return message_of(partial(torch.save, state, io.BytesIO()))


def check_refused(world: World, path: str) -> list[str]:
    model, optimizer = stepped(world, path)
    state = optimizer.state_dict()
    texts = [
        written(state),
        written({"optim": [copy.deepcopy(state)], "step": 1}),
        message_of(partial(pickle.dumps, state)),
    ]
    # The model is deleted: an optimizer that lives longer still knows its parts.
    for flat in (False, True):
        left = stepped(world, path, flat=flat)[1]
        gc.collect()
        texts.append(written(left.state_dict()))
    # What the message names.
    assert written(optim_state_dict(model, optimizer)) == "nothing was raised"
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert written(optimizer.state_dict()) == "nothing was raised"
    return texts


@pytest.mark.req("P-13")
@both_paths
def test_parts_that_nobody_asked_for_are_not_pickled(
    ranks: RankCount, path: str
) -> None:
    """On any rank, copied or inside other things; the ways out do."""
    for rank, texts in enumerate(ranks(2).run(check_refused, path)):
        for text in texts[:4]:
            elements = re.findall(r"\[\d+, \d+\) of \d+", text)[0]
            assert text == (
                "CheckpointError: optimizer.state_dict() holds this rank's part of "
                f"state 'exp_avg' of '0.weight', elements {elements} on rank {rank} of "
                "2, and is pickled (torch.save, accelerate's save_state, Fabric's "
                "save); expected a whole tensor, because a file that one rank writes "
                "would lose the parts of the others. Pickle what "
                "optim_state_dict(model, optimizer) returns, called on all ranks; or "
                "use composable_fsdp.save, or torch.distributed.checkpoint, which take "
                "each rank's part. For a file of each rank, call "
                "set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT) before."
            )
        assert "part of state 'exp_avg' of the flat parameter of '" in texts[4]


def check_whole(world: World, path: str) -> list[str]:
    kept = stepped(world, path, strategy=ShardingStrategy.NO_SHARD)[1].state_dict()
    found = [written(kept)]
    if world.world_size == 1:
        found.append(written(stepped(world, path)[1].state_dict()))
    return found


@both_paths
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_a_rank_holds_whole_is_pickled(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """One rank, or NO_SHARD."""
    for found in ranks(world_size).run(check_whole, path):
        assert set(found) == {"nothing was raised"}
