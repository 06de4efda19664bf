"""torch's async_save of sharded values: what was there when it was called is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
)

from composable_fsdp import optim_state_dict, state_dict_type
from tests.state_dict.dcp_tools import SHARDED
from tests.support.place import _same
from tests.support.reference import PATHS, adamw
from tests.support.sharded import RankCount, gpt, step
from tests.support.world import World

PROCESS = [
    pytest.mark.slow,
    pytest.mark.full_matrix("a thread holds the law, without a process"),
]
HOW = ["thread", pytest.param("process", marks=PROCESS)]


def save(world: World, path: str, how: str, folder: Path) -> Any:
    model = gpt(path)
    optimizer = adamw(model.parameters())
    step(model, optimizer, world.rank, 0)
    expected = dict(model.state_dict()), optim_state_dict(model, optimizer)["state"]
    with state_dict_type(model, SHARDED):
        saved = {
            "model": model.state_dict(),
            "optim": optim_state_dict(model, optimizer),
        }
    options: dict[str, Any] = {"checkpoint_id": folder}
    if how == "process":
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    else:  # its own group: the thread sends while the next step does
        options["process_group"] = dist.new_group(backend="gloo")
    future = async_save(saved, **options)
    step(model, optimizer, world.rank, 1)
    future.result()  # type: ignore[union-attr]  # torch may return another thing
    return expected


def load(world: World, path: str, folder: Path, expected: Any) -> None:
    model = gpt(path, seed=4)
    optimizer = adamw(model.parameters())
    step(model, optimizer, world.rank, 0)
    with state_dict_type(model, SHARDED):
        found = {
            "model": model.state_dict(),
            "optim": optim_state_dict(model, optimizer),
        }
    dcp_load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])  # names in the optimizer's order

    assert _same(dict(model.state_dict()), expected[0])
    assert _same(optim_state_dict(model, optimizer)["state"], expected[1])


@pytest.mark.req("S1-32")
@pytest.mark.parametrize("how", HOW)
def test_an_asynchronous_save_has_what_there_was_before_the_next_step(
    ranks: RankCount, how: str, tmp_path: Path
) -> None:
    """In a thread, and in another process."""
    expected = ranks(2).run(save, PATHS[0], how, tmp_path, timeout=110)[0]

    ranks(3).run(load, PATHS[1], tmp_path, expected)
