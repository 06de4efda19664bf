"""Which settings hold for a call: those that are set, or what torch's functions ask."""

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
    """What is set on the unit; what the options say in a call of torch's functions.

    As with FSDP1, those give sharded values unless ``full_state_dict`` is asked for.
    """
    asked = dcp_request()
    if asked is None:
        return state.state_dict_settings
    if asked.full:
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
    """Whether the shard group is the whole world in its order; alike on all ranks.

    Then ``rank0_only`` leaves everything where torch's functions look: on rank 0.
    """
    if groups.shard is None or groups.replicate is not None:
        return False
    everyone = list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(groups.shard) == everyone
