"""Fully sharded data parallel training as a composable API over flat buffers.

A name is resolved when it is first used, so that a program loads what it uses. What
every program gets stands in ``features.defaults``, for which ``--help`` does not wait.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from composable_fsdp import lazy as _lazy

if not _lazy.is_command_line():
    from composable_fsdp.features import defaults as _defaults  # noqa: F401

if TYPE_CHECKING:
    from composable_fsdp import access as access
    from composable_fsdp import api as api
    from composable_fsdp import doors as doors
    from composable_fsdp import errors as errors
    from composable_fsdp import features as features
    from composable_fsdp import fsdp2 as fsdp2
    from composable_fsdp import optim as optim
    from composable_fsdp import state_dict as state_dict
    from composable_fsdp import storage as storage
    from composable_fsdp import tools as tools
    from composable_fsdp import wrap as wrap
    from composable_fsdp.access.grads import clip_grad_norm_, no_sync
    from composable_fsdp.access.manual import (
        is_sharded,
        register_forward_method,
        reshard,
        unshard,
    )
    from composable_fsdp.access.norms import grad_norm, param_norm
    from composable_fsdp.access.single import (
        get_full_grad,
        get_full_param,
        set_full_grad,
        set_full_param,
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
        Placement,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from composable_fsdp.doors.open_wrapped_params import (
        open_wrapped_params,
    )
    from composable_fsdp.doors.wrapper import (
        FullyShardedDataParallel,
    )
    from composable_fsdp.entries.fully_shard import fully_shard
    from composable_fsdp.entries.replicate import replicate
    from composable_fsdp.errors import FSDPError
    from composable_fsdp.features.audit.first_step import audit
    from composable_fsdp.features.checkpoint import checkpoint
    from composable_fsdp.features.grad_scaler import (
        ShardedGradScaler,
    )
    from composable_fsdp.features.init_weights import init_weights
    from composable_fsdp.flat.region import FlatParameter
    from composable_fsdp.optim.load import (
        optim_state_dict_to_load,
    )
    from composable_fsdp.optim.save import optim_state_dict
    from composable_fsdp.planning.policies import CustomPolicy, ModuleWrapPolicy
    from composable_fsdp.state_dict.settings import (
        set_state_dict_type,
        state_dict_type,
    )
    from composable_fsdp.storage.convert import convert
    from composable_fsdp.storage.load import LoadOptions, load
    from composable_fsdp.storage.opening import checkpoints, verify
    from composable_fsdp.storage.save import SaveOptions, async_save, save
    from composable_fsdp.tools.describe import describe
    from composable_fsdp.tools.plan import plan
    from composable_fsdp.tools.sharding_plan import ShardingPlan, forecast
    from composable_fsdp.tools.simulate import simulate

_resolve, _ = _lazy.resolver(
    {
        "access.grads": "clip_grad_norm_ no_sync",
        "access.manual": "is_sharded register_forward_method reshard unshard",
        "access.norms": "grad_norm param_norm",
        "access.single": "get_full_grad get_full_param set_full_grad set_full_param",
        "access.unshard_params": "unshard_params",
        "compose.contract": "contract",
        "config": (
            "BackwardPrefetch Block CPUOffload FullOptimStateDictConfig "
            "FullStateDictConfig LocalOptimStateDictConfig LocalStateDictConfig "
            "MixedPrecision OptimStateDictConfig OptimStateKeyType "
            "Placement ShardedOptimStateDictConfig ShardedStateDictConfig "
            "ShardingStrategy StateDictConfig StateDictSettings StateDictType"
        ),
        "doors.open_wrapped_params": "open_wrapped_params",
        "doors.wrapper": "FullyShardedDataParallel",
        "entries.fully_shard": "fully_shard",
        "entries.replicate": "replicate",
        "errors": "FSDPError",
        "features.audit.first_step": "audit",
        "features.checkpoint": "checkpoint",
        "features.grad_scaler": "ShardedGradScaler",
        "features.init_weights": "init_weights",
        "flat.region": "FlatParameter",
        "optim.load": "optim_state_dict_to_load",
        "optim.save": "optim_state_dict",
        "planning.policies": "CustomPolicy ModuleWrapPolicy",
        "state_dict.settings": "set_state_dict_type state_dict_type",
        "storage.convert": "convert",
        "storage.load": "LoadOptions load",
        "storage.opening": "checkpoints verify",
        "storage.save": "SaveOptions async_save save",
        "tools.describe": "describe",
        "tools.plan": "plan",
        "tools.sharding_plan": "ShardingPlan forecast",
        "tools.simulate": "simulate",
    }
)

__all__ = [
    "BackwardPrefetch",
    "Block",
    "CPUOffload",
    "CustomPolicy",
    "FSDPError",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LoadOptions",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Placement",
    "SaveOptions",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingPlan",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "async_save",
    "audit",
    "checkpoint",
    "checkpoints",
    "clip_grad_norm_",
    "contract",
    "convert",
    "describe",
    "forecast",
    "fully_shard",
    "get_full_grad",
    "get_full_param",
    "grad_norm",
    "init_weights",
    "is_sharded",
    "load",
    "no_sync",
    "open_wrapped_params",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "param_norm",
    "plan",
    "register_forward_method",
    "replicate",
    "reshard",
    "save",
    "set_full_grad",
    "set_full_param",
    "set_state_dict_type",
    "simulate",
    "state_dict_type",
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
        if name in __all__:
            value = _resolve(name)
        else:
            value = import_module(f"{__name__}.doors.elsewhere").submodule(name)
        globals()[name] = value
        return value
