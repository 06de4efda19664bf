"""Every operation at real sizes, with the names of torch's FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from composable_fsdp import fsdp2
from tests.real_sizes.operations import PARTS, UNITS, make_pair, run_all
from tests.support.on_ranks import on_ranks
from tests.support.place import World

LACKS = dict.fromkeys(
    ("state_dict_full", "state_dict_full_rank0", "state_dict_sharded"),
    "the state dict of FSDP2 has no types",
)


def shard(model: nn.Module) -> nn.Module:
    for unit in UNITS:
        fsdp2.fully_shard(model.get_submodule(unit))
    sharded: nn.Module = fsdp2.fully_shard(model)
    return sharded


@pytest.mark.few(2)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("part", PARTS)
def test_every_operation_is_that_of_the_plain_model(
    world: World, part: str, tmp_path: Path
) -> None:
    """State dicts, optimizer state, single tensors, files, copies, clip."""
    run_all(part, make_pair(world, tmp_path, shard), but=LACKS)
