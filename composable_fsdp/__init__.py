"""Fully sharded data parallel training as a composable API over flat buffers.

A name is resolved when it is first used, so that a program loads what it uses. What
every program gets, whatever it uses, stands in ``features.defaults``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from composable_fsdp.features import defaults as _defaults  # noqa: F401  # registers

if TYPE_CHECKING:
    from composable_fsdp.access.grads import clip_grad_norm_, no_sync
    from composable_fsdp.access.manual import (
        UnshardHandle,
        full_shape,
        is_sharded,
        register_forward_method,
        register_fsdp_forward_method,
        reshard,
        unshard,
    )
    from composable_fsdp.access.norms import grad_norm, param_norm
    from composable_fsdp.access.schedule import (
        set_modules_to_backward_prefetch,
        set_modules_to_forward_prefetch,
        set_reshard_after_backward,
        set_reshard_after_forward,
    )
    from composable_fsdp.access.settings import (
        register_comm_hook,
        set_gradient_divide_factor,
        set_is_last_backward,
        set_reduce_scatter_unused_params,
        set_requires_all_reduce,
        set_requires_gradient_sync,
        set_separate_reduce_scatter_group,
    )
    from composable_fsdp.access.single import (
        get_full_grad,
        get_full_param,
        set_full_grad,
        set_full_param,
    )
    from composable_fsdp.access.unshard_params import unshard_params
    from composable_fsdp.comm.operations import OperationRecord, recent_operations
    from composable_fsdp.comm.wire_format import WireFormat, WireLayout
    from composable_fsdp.compose.contract import contract
    from composable_fsdp.config import (
        Arena,
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
    from composable_fsdp.doors.auto_wrap import (
        always_wrap_policy,
        lambda_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    from composable_fsdp.doors.checkpoint_wrapper import (
        CheckpointImpl,
        CheckpointWrapper,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from composable_fsdp.doors.open_wrapped_params import open_wrapped_params
    from composable_fsdp.doors.wrapper import FullyShardedDataParallel
    from composable_fsdp.entries.fully_shard import fully_shard
    from composable_fsdp.entries.replicate import replicate
    from composable_fsdp.errors import (
        CheckpointError,
        CollectiveError,
        CompositionError,
        DesyncError,
        FSDPError,
        NotRootError,
        PhaseError,
        PlanError,
    )
    from composable_fsdp.features.audit.first_step import audit
    from composable_fsdp.features.checkpoint import checkpoint
    from composable_fsdp.features.comm_hooks.hooks import (
        DefaultState,
        LowPrecisionState,
        ReplicaState,
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        reduce_scatter_hook,
        replica_hook,
    )
    from composable_fsdp.features.flat_params import (
        flat_parameter_groups,
        flat_parameters,
    )
    from composable_fsdp.features.grad_scaler import ShardedGradScaler
    from composable_fsdp.features.init_weights import init_weights
    from composable_fsdp.features.nonfinite import NonFinite, find_nonfinite
    from composable_fsdp.features.owners.map_on_owners import map_on_owners
    from composable_fsdp.features.owners.owner_state import OwnerState
    from composable_fsdp.features.replicas import (
        load_replica_state_dict,
        replica_state_dict,
    )
    from composable_fsdp.features.training.even_batches import even_batches
    from composable_fsdp.flat.region import FlatParameter
    from composable_fsdp.optim.keys import rekey_optim_state_dict
    from composable_fsdp.optim.load import optim_state_dict_to_load
    from composable_fsdp.optim.save import optim_state_dict
    from composable_fsdp.optim.single import get_full_optim_state, set_full_optim_state
    from composable_fsdp.planning.callables import size_based_auto_wrap_policy
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
    from composable_fsdp.state_dict.sharded import ShardedValue
    from composable_fsdp.storage.async_save import async_save, free_save_memory
    from composable_fsdp.storage.compare import LoadReport
    from composable_fsdp.storage.convert import convert
    from composable_fsdp.storage.export import export_safetensors
    from composable_fsdp.storage.load import LoadOptions, load
    from composable_fsdp.storage.opening import (
        CheckpointInfo,
        checkpoints,
        open_source,
        remove_stale,
        verify,
    )
    from composable_fsdp.storage.save import SaveOptions, save
    from composable_fsdp.storage.source import Source, TensorInfo
    from composable_fsdp.storage.storages import (
        Storage,
        StoredObject,
        Upload,
        register_storage,
    )
    from composable_fsdp.tools.activations import Activations, measure_activations
    from composable_fsdp.tools.describe import Description, describe
    from composable_fsdp.tools.forecast import Forecast, forecast
    from composable_fsdp.tools.plan import plan
    from composable_fsdp.tools.replan import replan
    from composable_fsdp.tools.sharding_plan import ShardingPlan
    from composable_fsdp.tools.simulate import simulate
    from composable_fsdp.tools.simulated_world import Machine
    from composable_fsdp.tools.simulation import Simulation

_HOMES = {
    "features.grad_scaler": "ShardedGradScaler",
    "access.grads": "clip_grad_norm_ no_sync",
    "features.init_weights": "init_weights",
    "access.manual": (
        "UnshardHandle full_shape is_sharded register_forward_method "
        "register_fsdp_forward_method reshard unshard"
    ),
    "features.nonfinite": "NonFinite find_nonfinite",
    "access.norms": "grad_norm param_norm",
    "access.schedule": (
        "set_modules_to_backward_prefetch set_modules_to_forward_prefetch "
        "set_reshard_after_backward set_reshard_after_forward"
    ),
    "access.settings": (
        "register_comm_hook set_gradient_divide_factor set_is_last_backward "
        "set_reduce_scatter_unused_params set_requires_all_reduce "
        "set_requires_gradient_sync set_separate_reduce_scatter_group"
    ),
    "access.single": "get_full_grad get_full_param set_full_grad set_full_param",
    "access.unshard_params": "unshard_params",
    "features.comm_hooks.int8_exchange": "int8_all_to_all_hook",
    "comm.operations": "OperationRecord recent_operations",
    "comm.wire_format": "WireFormat WireLayout",
    "features.wires.formats": "Float8Wire Int8Wire",
    "compose.contract": "contract",
    "config": (
        "Arena BackwardPrefetch Block CPUOffload FullOptimStateDictConfig "
        "FullStateDictConfig LocalOptimStateDictConfig LocalStateDictConfig "
        "MixedPrecision OptimStateDictConfig OptimStateKeyType "
        "ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy "
        "StateDictConfig StateDictSettings StateDictType"
    ),
    "doors.auto_wrap": (
        "always_wrap_policy lambda_auto_wrap_policy transformer_auto_wrap_policy"
    ),
    "doors.checkpoint_wrapper": (
        "CheckpointImpl CheckpointWrapper apply_activation_checkpointing "
        "checkpoint_wrapper offload_wrapper"
    ),
    "doors.open_wrapped_params": "open_wrapped_params",
    "doors.wrapper": "FullyShardedDataParallel",
    "features.checkpoint": "checkpoint",
    "entries.fully_shard": "fully_shard",
    "tools.plan": "plan",
    "entries.replicate": "replicate",
    "errors": (
        "CheckpointError CollectiveError CompositionError DesyncError FSDPError "
        "NotRootError PhaseError PlanError"
    ),
    "features.audit.first_step": "audit",
    "features.comm_hooks.hooks": (
        "DefaultState LowPrecisionState ReplicaState allreduce_hook bf16_compress_hook "
        "fp16_compress_hook reduce_scatter_hook replica_hook"
    ),
    "features.training.even_batches": "even_batches",
    "flat.region": "FlatParameter",
    "features.flat_params": "flat_parameter_groups flat_parameters",
    "optim.load": "optim_state_dict_to_load",
    "features.owners.owner_state": "OwnerState",
    "features.owners.map_on_owners": "map_on_owners",
    "optim.keys": "rekey_optim_state_dict",
    "features.replicas": "load_replica_state_dict replica_state_dict",
    "optim.save": "optim_state_dict",
    "optim.single": "get_full_optim_state set_full_optim_state",
    "planning.callables": "size_based_auto_wrap_policy",
    "tools.sharding_plan": "ShardingPlan",
    "planning.policies": "CustomPolicy ModuleWrapPolicy SizePolicy",
    "tools.replan": "replan",
    "state_dict.settings": "get_state_dict_type set_state_dict_type state_dict_type",
    "state_dict.sharded": "ShardedValue",
    "storage.async_save": "async_save free_save_memory",
    "storage.compare": "LoadReport",
    "storage.convert": "convert",
    "storage.export": "export_safetensors",
    "storage.load": "LoadOptions load",
    "storage.opening": ("CheckpointInfo checkpoints open_source remove_stale verify"),
    "storage.save": "SaveOptions save",
    "storage.source": "Source TensorInfo",
    "storage.storages": "Storage StoredObject Upload register_storage",
    "tools.activations": "Activations measure_activations",
    "tools.describe": "Description describe",
    "tools.forecast": "Forecast forecast",
    "tools.simulate": "simulate",
    "tools.simulated_world": "Machine",
    "tools.simulation": "Simulation",
}
"""The modules of the package with the public names that they make."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Activations",
    "Arena",
    "BackwardPrefetch",
    "Block",
    "CPUOffload",
    "CheckpointError",
    "CheckpointImpl",
    "CheckpointInfo",
    "CheckpointWrapper",
    "CollectiveError",
    "CompositionError",
    "CustomPolicy",
    "DefaultState",
    "Description",
    "DesyncError",
    "FSDPError",
    "FlatParameter",
    "Float8Wire",
    "Forecast",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "Int8Wire",
    "LoadOptions",
    "LoadReport",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "LowPrecisionState",
    "Machine",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "NonFinite",
    "NotRootError",
    "OperationRecord",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OwnerState",
    "PhaseError",
    "PlanError",
    "ReplicaState",
    "SaveOptions",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardedValue",
    "ShardingPlan",
    "ShardingStrategy",
    "Simulation",
    "SizePolicy",
    "Source",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Storage",
    "StoredObject",
    "TensorInfo",
    "UnshardHandle",
    "Upload",
    "WireFormat",
    "WireLayout",
    "allreduce_hook",
    "always_wrap_policy",
    "apply_activation_checkpointing",
    "async_save",
    "audit",
    "bf16_compress_hook",
    "checkpoint",
    "checkpoint_wrapper",
    "checkpoints",
    "clip_grad_norm_",
    "contract",
    "convert",
    "describe",
    "even_batches",
    "export_safetensors",
    "find_nonfinite",
    "flat_parameter_groups",
    "flat_parameters",
    "forecast",
    "fp16_compress_hook",
    "free_save_memory",
    "full_shape",
    "fully_shard",
    "get_full_grad",
    "get_full_optim_state",
    "get_full_param",
    "get_state_dict_type",
    "grad_norm",
    "init_weights",
    "int8_all_to_all_hook",
    "is_sharded",
    "lambda_auto_wrap_policy",
    "load",
    "load_replica_state_dict",
    "map_on_owners",
    "measure_activations",
    "no_sync",
    "offload_wrapper",
    "open_source",
    "open_wrapped_params",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "param_norm",
    "plan",
    "recent_operations",
    "reduce_scatter_hook",
    "register_comm_hook",
    "register_forward_method",
    "register_fsdp_forward_method",
    "register_storage",
    "rekey_optim_state_dict",
    "remove_stale",
    "replan",
    "replica_hook",
    "replica_state_dict",
    "replicate",
    "reshard",
    "save",
    "set_full_grad",
    "set_full_optim_state",
    "set_full_param",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_reduce_scatter_unused_params",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_separate_reduce_scatter_group",
    "set_state_dict_type",
    "simulate",
    "size_based_auto_wrap_policy",
    "state_dict_type",
    "transformer_auto_wrap_policy",
    "unshard",
    "unshard_params",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Hidden from type checkers, which would take every name for one of the package.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a public name or a submodule, and keep it for the next use."""
        home = _HOME_OF.get(name)
        if home is not None:
            value = getattr(import_module(f"{__name__}.{home}"), name)
        else:
            value = import_module(f"{__name__}.doors.elsewhere").submodule(name)
        globals()[name] = value
        return value
