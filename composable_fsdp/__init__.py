"""Fully sharded data parallel training as a composable API over flat buffers."""

from composable_fsdp.access.grad_scaler import ShardedGradScaler
from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.access.methods import (
    register_forward_method,
    register_fsdp_forward_method,
)
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
from composable_fsdp.entries.checkpoint import checkpoint
from composable_fsdp.entries.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.entries.replicate import replicate
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
    "CheckpointImpl",
    "CheckpointWrapper",
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
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_wrapper",
    "clip_grad_norm_",
    "contract",
    "fully_shard",
    "get_state_dict_type",
    "lambda_auto_wrap_policy",
    "no_sync",
    "offload_wrapper",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "plan",
    "register_forward_method",
    "register_fsdp_forward_method",
    "rekey_optim_state_dict",
    "replicate",
    "set_state_dict_type",
    "size_based_auto_wrap_policy",
    "state_dict_type",
    "transformer_auto_wrap_policy",
    "unshard_params",
]
