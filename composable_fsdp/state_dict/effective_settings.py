"""The state dict settings of a call: the unit's settings, or the request of DCP."""

from __future__ import annotations

import torch.distributed as dist

from composable_fsdp.comm.groups import Groups
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from composable_fsdp.state_dict.dcp_caller import dcp_request
from composable_fsdp.tree.state import _FSDPState


def effective_settings(state: _FSDPState) -> StateDictSettings:
    """Return the unit's settings, or the settings that a calling DCP asks for.

    As with FSDP1, DCP's functions get sharded values unless ``full_state_dict`` is set.
    """
    asked = dcp_request()
    if asked is None:
        return state.settings.state_dict
    if asked.full:
        # With both options DCP keeps the result on rank 0 only, so the other ranks need
        # no full tensors. This holds only if ``rank0_only`` selects rank 0.
        first = asked.to_cpu and rank_0_is_first(state.handle.groups)
        return StateDictSettings(
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=asked.to_cpu, rank0_only=first),
            FULL_BY_DEFAULT.optim_state_dict_config,
        )
    return StateDictSettings(
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=asked.to_cpu),
        ShardedOptimStateDictConfig(),
    )


def rank_0_is_first(groups: Groups) -> bool:
    """Return whether the shard group is the whole world in order; equal on all ranks.

    Then ``rank0_only`` puts all values on rank 0, where DCP's functions read them.
    """
    if groups.shard is None or groups.replicate is not None:
        return False
    # The order matters, too: the group's first rank must be global rank 0.
    everyone = list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(groups.shard) == everyone
