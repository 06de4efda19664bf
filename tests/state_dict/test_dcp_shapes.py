"""Parameters of every shape through torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from composable_fsdp import (
    Block,
    optim_state_dict,
    state_dict_type,
)
from composable_fsdp.optim.own_state_dict import local_state_dict
from tests.state_dict.dcp_tools import (
    SHARDED,
    corners,
    load_sending_nothing,
    save_sending_nothing,
)
from tests.support.place import _same
from tests.support.reference import PATHS
from tests.support.sharded import (
    RankCount,
    both_paths,
)
from tests.support.world import World


def save_corners(world: World, path: str, block: Block, folder: Path) -> Any:
    model, optimizer = corners(path, block, 3)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with state_dict_type(model, SHARDED):
        saved = {
            "model": model.state_dict(),
            "optim": optim_state_dict(model, optimizer),
        }
    save_sending_nothing(saved, folder)
    return dict(model.state_dict()), optim_state_dict(model, optimizer)["state"]


def load_corners(world: World, block: Block, folder: Path, expected: Any) -> None:
    for path in ("plain", *PATHS):
        model, optimizer = corners(path, block, 5)
        weights, state = get_state_dict(model, optimizer)
        found: dict[str, Any] = {"model": weights, "optim": state}
        load_sending_nothing(found, folder)
        model.load_state_dict(found["model"])
        set_optimizer_state_dict(model, optimizer, found["optim"])

        assert _same(dict(model.state_dict()), expected[0])
        state = optim_state_dict(model, optimizer)["state"]
        assert _same(state, expected[1])
        whole = StateDictOptions(full_state_dict=True)
        full = get_optimizer_state_dict(model, optimizer, options=whole)
        new = torch.optim.AdamW(model.parameters(), lr=0.1)
        set_optimizer_state_dict(model, new, full, options=whole)
        assert _same(
            local_state_dict(new)["state"], local_state_dict(optimizer)["state"]
        )


@pytest.mark.few(2)
@pytest.mark.req("X-28")
@pytest.mark.parametrize("block", Block, ids=lambda b: b.name)
@pytest.mark.parametrize("before", [2, 3])
@both_paths
def test_parameters_of_any_shape_go_through_a_checkpoint(
    ranks: RankCount, path: str, before: int, block: Block, tmp_path: Path
) -> None:
    """Without dimensions, without elements, cut inside rows; to any world size."""
    expected = ranks(before).run(save_corners, path, block, tmp_path)[0]

    for after in (1, 2, 4):
        ranks(after).run(load_corners, block, tmp_path, expected)
