"""Every operation at real sizes, with ``FullyShardedDataParallel``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from composable_fsdp import FullyShardedDataParallel
from tests.real_sizes.operations import PARTS, UNITS, make_pair, run_all, same_state
from tests.support.on_ranks import on_ranks
from tests.support.place import World
from tests.support.reference import apply_units


def method(model: Any) -> Tensor:
    clipped: Tensor = model.clip_grad_norm_(0.5)
    return clipped


@pytest.mark.few(2)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("part", PARTS)
def test_every_operation_is_that_of_the_plain_model(
    world: World, part: str, tmp_path: Path
) -> None:
    """State dicts, optimizer state, single tensors, files, copies, clip."""
    run_all(
        part,
        make_pair(
            world, tmp_path, lambda m: apply_units(m, UNITS, path="wrapper"), method
        ),
    )


@pytest.mark.few(1)
@on_ranks(1, 2, 3)
def test_the_older_functions_of_optimizer_state(world: World, tmp_path: Path) -> None:
    """FSDP1's static methods, full and sharded."""
    p = make_pair(world, tmp_path, lambda m: apply_units(m, UNITS, path="wrapper"))
    fsdp = FullyShardedDataParallel
    full = fsdp.full_optim_state_dict(p.model, p.optim, rank0_only=False)
    same_state(full, p)
    with p.state_lost():
        p.optim.load_state_dict(fsdp.shard_full_optim_state_dict(full, p.model))
    with p.state_lost():
        given = full if world.rank == 0 else None
        p.optim.load_state_dict(fsdp.scatter_full_optim_state_dict(given, p.model))
    saved = fsdp.sharded_optim_state_dict(p.model, p.optim)
    with p.state_lost():
        given = fsdp.flatten_sharded_optim_state_dict(saved, p.model, p.optim)
        p.optim.load_state_dict(given)
