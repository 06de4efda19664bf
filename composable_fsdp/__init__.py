"""Fully sharded data parallel training as a composable API over flat buffers."""

from composable_fsdp.access.grad_scaler import ShardedGradScaler
from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.access.unshard_params import unshard_params
from composable_fsdp.compose.contract import contract
from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
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
from composable_fsdp.flat.parameter import FlatParameter
from composable_fsdp.optim.load import optim_state_dict_to_load
from composable_fsdp.optim.rekey import rekey_optim_state_dict
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
from composable_fsdp.state_dict.settings import (
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
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
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "NotRootError",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PhaseError",
    "PlanError",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingPlan",
    "ShardingStrategy",
    "SizePolicy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "always_wrap_policy",
    "clip_grad_norm_",
    "contract",
    "fully_shard",
    "get_state_dict_type",
    "lambda_auto_wrap_policy",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "plan",
    "rekey_optim_state_dict",
    "set_state_dict_type",
    "size_based_auto_wrap_policy",
    "state_dict_type",
    "transformer_auto_wrap_policy",
    "unshard_params",
]
