"""Every public operation at real sizes, through each of the three doors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import composable_fsdp as cf
from composable_fsdp import fsdp2
from tests.real_sizes.operations import (
    OPERATIONS,
    UNITS,
    Operation,
    Pair,
    make_pair,
    run_all,
    same_state,
    save_and_load,
    state_dict_full,
    state_dict_own,
    torch_state_dict,
    train_and_clip,
    unsharded,
)
from tests.support.place import World
from tests.support.reference import apply_units
from tests.support.sharded import RankCount


def as_fsdp2(model: nn.Module) -> nn.Module:
    for unit in UNITS:
        fsdp2.fully_shard(model.get_submodule(unit))
    sharded: nn.Module = fsdp2.fully_shard(model)
    return sharded


def older_functions(p: Pair) -> None:
    """FSDP1's static methods, full and sharded."""
    fsdp = cf.FullyShardedDataParallel
    full = fsdp.full_optim_state_dict(p.model, p.optim, rank0_only=False)
    same_state(full, p)
    with p.state_lost():
        p.optim.load_state_dict(fsdp.shard_full_optim_state_dict(full, p.model))
    with p.state_lost():
        given = full if p.world.rank == 0 else None
        p.optim.load_state_dict(fsdp.scatter_full_optim_state_dict(given, p.model))
    saved = fsdp.sharded_optim_state_dict(p.model, p.optim)
    with p.state_lost():
        given = fsdp.flatten_sharded_optim_state_dict(saved, p.model, p.optim)
        p.optim.load_state_dict(given)


def clip(model: Any) -> Any:
    return model.clip_grad_norm_(0.5)


AT_DOORS = (train_and_clip, state_dict_own, torch_state_dict, unsharded, save_and_load)
"""The operations that a door has a part in; others go by the units alone."""
Door = tuple[Callable[[nn.Module], nn.Module], tuple[Operation, ...], dict[str, Any]]
DOORS: dict[str, Door] = {
    "fully_shard": (partial(apply_units, units=UNITS), OPERATIONS, {}),
    "fsdp2": (as_fsdp2, AT_DOORS, {}),
    "wrapper": (
        partial(apply_units, units=UNITS, path="wrapper"),
        (*AT_DOORS, state_dict_full, older_functions),
        {"clip": clip},
    ),
}


def check(world: World, door: str, folder: Path) -> None:
    shard, operations, how = DOORS[door]
    run_all(operations, make_pair(world, folder, shard, **how))


@pytest.mark.req("R-01")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("door", DOORS)
def test_every_operation_is_that_of_the_plain_model(
    ranks: RankCount, door: str, tmp_path: Path
) -> None:
    """State dicts, optimizer state, single tensors, files, copies, clip."""
    ranks(2).run(check, door, tmp_path, timeout=200)
