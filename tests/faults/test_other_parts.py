"""Ranks that hold other parts of a model compare what they have in common.

Torch compares nothing: tensor-parallel ranks of other options end in SIGABRT, and ranks
of other seeds compute with other values of the parameters that are not cut, in silence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
)
from tests.faults.fingerprints import Outcome, outcome
from tests.parallel.models import forget_meshes
from tests.support.sharded import RankCount
from tests.support.world import World


class Block(nn.Module):
    """A normalization, which no rank cuts, and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).relu())
        return out


def tensor_parallel(mesh: DeviceMesh, seed: int, **options: Any) -> nn.Module:
    """Two blocks whose matrices are cut over ``tp``, sharded over ``dp``."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, device_mesh=mesh["dp"], **options)
    return fully_shard(model, device_mesh=mesh["dp"], **options)


def differ_over_tp(world: World, seeds: bool, options: dict[str, Any]) -> Outcome:
    """The ranks of the second tensor-parallel index have another seed or options."""
    forget_meshes()
    shape = (world.world_size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    odd = world.rank % 2
    model = tensor_parallel(mesh, odd * seeds, **(options if odd else {}))
    return outcome(lambda: model(torch.ones(2, 8)).sum().backward())


@pytest.mark.req("X-09", "X-13")
def test_tensor_parallel_ranks_compare_what_is_not_cut(ranks: RankCount) -> None:
    """Options, and the values of a normalization; each pair of ranks names itself."""
    zero2 = {"strategy": ShardingStrategy.SHARD_GRAD_OP}
    options = ranks(4).run(differ_over_tp, False, zero2)
    values = ranks(4).run(differ_over_tp, True, {})
    equal = ranks(4).run(differ_over_tp, False, {})

    for rank in range(4):
        first, second = rank // 2 * 2, rank // 2 * 2 + 1
        assert (
            f"the option strategy of unit (root): FULL_SHARD on rank {first}, "
            f"SHARD_GRAD_OP on rank {second}"
        ) in str(options[rank].error)
        (text,) = [w for w in values[rank].warnings if "different weights" in w]
        assert "'0.norm.weight' has other values on rank" in text
        assert "The parameter is not cut over these ranks" in text
        assert values[rank].error is equal[rank].error is None
        assert not [w for w in equal[rank].warnings if "different weights" in w]
