"""What a group of ranks can do for tensors on a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import ShardingStrategy, fully_shard
from composable_fsdp.comm.groups import GroupRef, Groups, operation_log
from composable_fsdp.comm.meshes import groups_for, resolve_ranks
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.world import fake_world


@pytest.mark.parametrize(
    ("backends", "after"),
    [("cuda:nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("cpu:gloo,cuda:gloo", 4)],
)
def test_only_nccl_is_asked_for_averages(
    monkeypatch: pytest.MonkeyPatch, backends: str, after: int
) -> None:
    """gloo sums tensors on a GPU, too, and refuses to average: we divide then."""
    with fake_world(4) as world:
        (handle,) = _get_fsdp_handles(fully_shard(nn.Linear(4, 4)))
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
        log = operation_log(world.group)
        backend = GroupRef(world.group)
        monkeypatch.setattr(log, "is_nccl", backend.is_nccl)
        handle.groups = Groups(world.group, None)
        handle.layout = replace(handle.layout, device=torch.device("cuda", 0))

        set_divisions(handle)

    assert handle.layout.trainable[0].reduce.division == (1, after, after == 1)


def test_nccl_divides_its_communicator_when_groups_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks make groups, but a replica may be the first to send, and alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = torch.device("cuda", 0)
    with fake_world(4) as world:
        world.group.bound_device_id = device
        ranks = resolve_ranks(None, None, "fully_shard")
        for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HFSDP):
            for group in groups_for(ranks, strategy).sending:
                # torch then connects at once, as in ``new_group``.
                assert group.bound_device_id == device


ENDING = """
import weakref
import composable_fsdp
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
# The first optimizer of a process imports this module by way of torch.compile.
import torch.distributed.nn.functional

dist.destroy_process_group()
print(group())
"""


def test_a_destroyed_default_group_is_gone() -> None:
    """In a process of its own: threads of a group that lives on abort some exits."""
    command = [sys.executable, "-c", ENDING]

    done = subprocess.run(command, check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "None"


def test_a_pair_of_groups_that_is_no_grid_has_no_group_of_all_ranks() -> None:
    """Ranks 0 3 and 1 2, over 0 1 and 2 3: a rank does not know the ranks of others."""
    with fake_world(4):
        pair = dist.new_group([0, 3]), dist.new_group([0, 1])
        fully_shard(
            nn.Linear(2, 2), process_group=pair, strategy=ShardingStrategy.HYBRID_SHARD
        )
        with pytest.raises(PlanError, match="2-D device_mesh"):
            fully_shard(
                nn.Linear(2, 2), process_group=pair, strategy=ShardingStrategy.NO_SHARD
            )
