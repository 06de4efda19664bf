"""Set the type of the state dicts that a model returns and loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from composable_fsdp.access.settings import units_of
from composable_fsdp.comm.groups import Groups
from composable_fsdp.config import (
    FULL_BY_DEFAULT,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import by_fields, by_name
from composable_fsdp.state_dict.dcp_caller import dcp_request
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


@dataclass(frozen=True)
class LiveStateDictConfig(ShardedStateDictConfig):
    """FSDP2's way, and DCP's: sharded values are the memory of the shards."""


_FULL, _SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
_CONFIGS: dict[
    StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]
] = {
    _FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    _SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
"""The configuration classes of each type, of the model and of the optimizer."""
LIVE = StateDictSettings(_SHARDED, LiveStateDictConfig(), ShardedOptimStateDictConfig())


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the type of the state dicts of ``module`` and of its optimizers from now on.

    Every rank must set the same.

    Args:
        module: A module that holds fully sharded modules.
        state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT.
        state_dict_config: The configuration for model state dicts. Default: the default
            configuration of the type.
        optim_state_dict_config: The configuration for optimizer state dicts. Default:
            the default configuration of the type.

    Returns: the settings of the first unit before the call.
    Raises: CompositionError, without a fully sharded module; TypeError, for a wrong
        type or a configuration of another type; ValueError, for ``_use_dtensor=True``.
    """
    # Torch's own enum and configuration classes are taken, too.
    kind = by_name(StateDictType, state_dict_type, argument="state_dict_type")
    model_form, optim_form = _CONFIGS[kind]
    model_config = by_fields(
        model_form, state_dict_config or model_form(), argument="state_dict_config"
    )
    optim_config = by_fields(
        optim_form,
        optim_state_dict_config or optim_form(),
        argument="optim_state_dict_config",
    )
    for config in (model_config, optim_config):
        if getattr(config, "_use_dtensor", False):
            raise ValueError(
                f"{type(config).__name__}(_use_dtensor=True) expects every parameter "
                "to be cut into equal numbers of rows, as a DTensor is; here a "
                "parameter is cut where its flat buffer is. Leave it out: sharded "
                "values are ShardedValue, whose checkpoints load into DTensors, and "
                "the other way round."
            )
    settings = StateDictSettings(kind, model_config, optim_config)
    states = units_of(module, "set_state_dict_type", recurse=True)
    # As FSDP1, which returns the settings of the first unit for the whole model.
    before = states[0].settings.state_dict
    for state in states:
        state.settings.state_dict = settings
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings of the units in ``module``; the default is full tensors.

    Raises: CompositionError, without a fully sharded module, or if units differ.
    """
    units_of(module, "get_state_dict_type", recurse=True)
    (name, _, first), *rest = walk_states(module)
    for fqn, _, state in rest:
        if state.settings.state_dict != first.settings.state_dict:
            raise CompositionError(
                f"Units differ in their state dict settings: {quoted(name)} has "
                f"{first.settings.state_dict}, {quoted(fqn)} has "
                f"{state.settings.state_dict}. Call set_state_dict_type on the whole "
                "model, or ask each unit alone."
            )
    return first.settings.state_dict


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the type while the block runs; see ``set_state_dict_type``.

    Args, Raises: As ``set_state_dict_type``.

    >>> with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
    ...     mine = model.state_dict()
    """
    states = units_of(module, "state_dict_type", recurse=True)
    # Per unit, because units may have had different settings.
    before = [state.settings.state_dict for state in states]
    set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        for state, settings in zip(states, before, strict=True):
            state.settings.state_dict = settings


def effective_settings(state: _FSDPState) -> StateDictSettings:
    """Return the unit's settings, or the settings that a calling DCP asks for."""
    asked = dcp_request()
    if asked is None:
        return state.settings.state_dict
    if not asked.full and not asked.to_cpu:
        return LIVE
    if not asked.full:
        sharded = ShardedStateDictConfig(offload_to_cpu=asked.to_cpu)
        return StateDictSettings(_SHARDED, sharded, ShardedOptimStateDictConfig())
    # With both options DCP keeps the result on rank 0 only.
    first = asked.to_cpu and rank_0_is_first(state.handle.groups)
    config = FullStateDictConfig(offload_to_cpu=asked.to_cpu, rank0_only=first)
    return StateDictSettings(_FULL, config, FULL_BY_DEFAULT.optim_state_dict_config)


def rank_0_is_first(groups: Groups) -> bool:
    """Return whether the shard group is the whole world, in order."""
    if groups.shard is None or groups.replicate is not None:
        return False
    # The order matters, too: the group's first rank must be global rank 0.
    everyone = list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(groups.shard) == everyone
