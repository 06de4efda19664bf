"""Claims on DCP directories of several ranks: boxes of any form, read in any slice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from composable_fsdp import Block, export_safetensors, fully_shard
from composable_fsdp.storage.opening import open_source
from tests.state_dict.dcp_tools import sharded
from tests.storage.samples import everything, same
from tests.storage.test_export import Parts
from tests.support.sharded import RankCount
from tests.support.world import World


def cube() -> Tensor:
    return torch.arange(4.0 * 5 * 6).view(4, 5, 6)


def check_save(world: World, folder: str, placements: list[Placement]) -> None:
    sizes = (world.world_size,) if len(placements) == 1 else (2, world.world_size // 2)
    mesh = init_device_mesh("cpu", sizes)
    value = distribute_tensor(cube(), mesh, placements)
    dcp_save({"model": {"cube": value}}, checkpoint_id=folder)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("placements", "world_size"),
    [([Shard(1)], 2), ([Shard(2)], 3), ([Shard(2), Shard(0)], 4)],
    ids=str,
)
def test_any_slice_of_a_tensor_cut_along_any_dim_is_read(
    ranks: RankCount, tmp_path: Path, placements: list[Placement], world_size: int
) -> None:
    """Row-major slices go through boxes that do not lie in rows."""
    ranks(world_size).run(check_save, str(tmp_path / "dcp"), placements)
    flat = cube().reshape(-1)

    with open_source(tmp_path / "dcp") as source:
        for start in range(0, 120, 7):
            for stop in (start, start + 1, min(start + 5, 120), 120):
                part = source.read_model("cube", start, stop)
                assert torch.equal(part, flat[start:stop])


def check_own(world: World, folder: str) -> None:
    model = Parts()
    fully_shard(model, block=Block.ELEMENT)
    dcp_save({"model": sharded(model)}, checkpoint_id=folder)


@pytest.mark.req("D-17")
def test_our_own_shards_in_several_boxes_come_out_whole(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Saved by three ranks through DCP, exported offline."""
    ranks(3).run(check_own, str(tmp_path / "dcp"))

    export_safetensors(tmp_path / "st", tmp_path / "dcp")

    with open_source(tmp_path / "st") as source:
        assert same(everything(source)["model"], dict(Parts().state_dict()))
