"""Claims on DCP directories of several ranks: boxes of any form, read in any slice."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable_fsdp.storage.opening import open_source
from tests.support.sharded import RankCount
from tests.support.world import World


def cube() -> Tensor:
    return torch.arange(4.0 * 5 * 6).view(4, 5, 6)


def check_save(world: World, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    value = distribute_tensor(cube(), mesh, [Shard(2), Shard(0)])
    dcp_save({"model": {"cube": value}}, checkpoint_id=folder)


def test_any_slice_of_a_tensor_cut_along_any_dim_is_read(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Row-major slices go through boxes that do not lie in rows."""
    ranks(4).run(check_save, str(tmp_path / "dcp"))
    flat = cube().reshape(-1)

    with open_source(tmp_path / "dcp") as source:
        for start in range(0, 120, 7):
            for stop in (start, start + 1, min(start + 5, 120), 120):
                part = source.read_model("cube", start, stop)
                assert torch.equal(part, flat[start:stop])
