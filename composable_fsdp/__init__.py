"""Fully sharded data parallel training as a composable API over flat buffers."""

from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.access.manual import UnshardHandle, is_sharded, reshard, unshard
from composable_fsdp.access.schedule import (
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from composable_fsdp.access.unshard_params import unshard_params
from composable_fsdp.compose.contract import contract
from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.entries.wrapper import FullyShardedDataParallel
from composable_fsdp.errors import (
    CheckpointError,
    CompositionError,
    DesyncError,
    FSDPError,
    NotRootError,
    PhaseError,
    PlanError,
)
from composable_fsdp.optim.load import optim_state_dict_to_load
from composable_fsdp.optim.save import optim_state_dict
from composable_fsdp.planning.callables import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from composable_fsdp.planning.plan import ShardingPlan
from composable_fsdp.planning.planner import plan
from composable_fsdp.planning.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    SizePolicy,
)

__all__ = [
    "BackwardPrefetch",
    "Block",
    "CPUOffload",
    "CheckpointError",
    "CompositionError",
    "CustomPolicy",
    "DesyncError",
    "FSDPError",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "NotRootError",
    "PhaseError",
    "PlanError",
    "ShardingPlan",
    "ShardingStrategy",
    "SizePolicy",
    "UnshardHandle",
    "always_wrap_policy",
    "clip_grad_norm_",
    "contract",
    "fully_shard",
    "is_sharded",
    "lambda_auto_wrap_policy",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "plan",
    "reshard",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "unshard",
    "unshard_params",
]
