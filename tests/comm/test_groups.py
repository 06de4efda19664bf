"""What a group of ranks can do for tensors on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.comm.groups import Groups
from composable_fsdp.comm.operations import operation_log
from composable_fsdp.comm.sequence import OperationLog
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
        backend = OperationLog(world.group, log.watcher)
        monkeypatch.setattr(log, "is_nccl", backend.is_nccl)
        handle.groups = Groups(world.group, None)
        handle.layout = replace(handle.layout, device=torch.device("cuda", 0))

        set_divisions(handle)

    assert handle.layout.trainable[0].reduce.division == (1, after, after == 1)
