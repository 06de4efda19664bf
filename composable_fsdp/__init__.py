"""Fully sharded data parallel training as a composable API over flat buffers.

A name is resolved when it is first used; ``features.defaults`` is what all programs
get.
"""

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
    from composable_fsdp.access.grads import clip_grad_norm_ as clip_grad_norm_
    from composable_fsdp.access.grads import grad_norm as grad_norm
    from composable_fsdp.access.grads import no_sync as no_sync
    from composable_fsdp.access.grads import param_norm as param_norm
    from composable_fsdp.access.manual import is_sharded as is_sharded
    from composable_fsdp.access.manual import (
        register_forward_method as register_forward_method,
    )
    from composable_fsdp.access.manual import reshard as reshard
    from composable_fsdp.access.manual import unshard as unshard
    from composable_fsdp.access.single import get_full_grad as get_full_grad
    from composable_fsdp.access.single import get_full_param as get_full_param
    from composable_fsdp.access.single import set_full_grad as set_full_grad
    from composable_fsdp.access.single import set_full_param as set_full_param
    from composable_fsdp.access.unshard_params import unshard_params as unshard_params
    from composable_fsdp.compose.contract import contract as contract
    from composable_fsdp.config import BackwardPrefetch as BackwardPrefetch
    from composable_fsdp.config import Block as Block
    from composable_fsdp.config import CPUOffload as CPUOffload
    from composable_fsdp.config import (
        FullOptimStateDictConfig as FullOptimStateDictConfig,
    )
    from composable_fsdp.config import FullStateDictConfig as FullStateDictConfig
    from composable_fsdp.config import (
        LocalOptimStateDictConfig as LocalOptimStateDictConfig,
    )
    from composable_fsdp.config import LocalStateDictConfig as LocalStateDictConfig
    from composable_fsdp.config import MixedPrecision as MixedPrecision
    from composable_fsdp.config import OptimStateDictConfig as OptimStateDictConfig
    from composable_fsdp.config import OptimStateKeyType as OptimStateKeyType
    from composable_fsdp.config import Placement as Placement
    from composable_fsdp.config import (
        ShardedOptimStateDictConfig as ShardedOptimStateDictConfig,
    )
    from composable_fsdp.config import ShardedStateDictConfig as ShardedStateDictConfig
    from composable_fsdp.config import ShardingStrategy as ShardingStrategy
    from composable_fsdp.config import StateDictConfig as StateDictConfig
    from composable_fsdp.config import StateDictSettings as StateDictSettings
    from composable_fsdp.config import StateDictType as StateDictType
    from composable_fsdp.doors.open_wrapped_params import (
        open_wrapped_params as open_wrapped_params,
    )
    from composable_fsdp.doors.wrapper import (
        FullyShardedDataParallel as FullyShardedDataParallel,
    )
    from composable_fsdp.entries.fully_shard import fully_shard as fully_shard
    from composable_fsdp.entries.replicate import replicate as replicate
    from composable_fsdp.errors import FSDPError as FSDPError
    from composable_fsdp.features.audit import audit as audit
    from composable_fsdp.features.checkpoint import checkpoint as checkpoint
    from composable_fsdp.features.grad_scaler import (
        ShardedGradScaler as ShardedGradScaler,
    )
    from composable_fsdp.features.init_weights import init_weights as init_weights
    from composable_fsdp.flat.region import FlatParameter as FlatParameter
    from composable_fsdp.optim.load import (
        optim_state_dict_to_load as optim_state_dict_to_load,
    )
    from composable_fsdp.optim.save import optim_state_dict as optim_state_dict
    from composable_fsdp.planning.policies import CustomPolicy as CustomPolicy
    from composable_fsdp.planning.policies import ModuleWrapPolicy as ModuleWrapPolicy
    from composable_fsdp.state_dict.settings import (
        set_state_dict_type as set_state_dict_type,
    )
    from composable_fsdp.state_dict.settings import state_dict_type as state_dict_type
    from composable_fsdp.storage.convert import convert as convert
    from composable_fsdp.storage.load import LoadOptions as LoadOptions
    from composable_fsdp.storage.load import load as load
    from composable_fsdp.storage.opening import checkpoints as checkpoints
    from composable_fsdp.storage.opening import verify as verify
    from composable_fsdp.storage.save import SaveOptions as SaveOptions
    from composable_fsdp.storage.save import async_save as async_save
    from composable_fsdp.storage.save import save as save
    from composable_fsdp.tools.describe import describe as describe
    from composable_fsdp.tools.plan import plan as plan
    from composable_fsdp.tools.sharding_plan import ShardingPlan as ShardingPlan
    from composable_fsdp.tools.sharding_plan import forecast as forecast
    from composable_fsdp.tools.simulate import simulate as simulate

__all__ = _lazy.public_names(__name__)
