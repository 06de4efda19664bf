"""State dicts through ``module.state_dict()`` and ``module.load_state_dict()``.

Hooks sit on the fully sharded modules, so the calls work on any module that holds one,
with the keys of the plain model. Saving replaces each shard by the whole parameter
after torch has filled in the subtree; loading replaces each whole value by this rank's
part before torch copies it. The unit's setting (``settings.py``) may ask for the
shards instead, for host memory, or for one rank alone.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.config import FullStateDictConfig, StateDictType
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter
from composable_fsdp.naming import TRANSPARENT, shown, strip_wrapper
from composable_fsdp.phases import Phase
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.runtime.recover import drop_full, settle
from composable_fsdp.state_dict.full import gather_unit, part_of
from composable_fsdp.state_dict.in_force import settings_in_force
from composable_fsdp.state_dict.local import (
    PLAN,
    LocalValue,
    local_values,
    plan_of,
    plans_of,
    require_plan,
)
from composable_fsdp.state_dict.meeting import meet
from composable_fsdp.state_dict.sharded import ShardedValue, sharded_values, unfit
from composable_fsdp.state_dict.unit_keys import Reach, keys_of, names_below, reaches
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states

_keys = count(-1, -1)
"""Of our hooks; torch numbers from 0 up, and a module may have hooks of two units."""


def install_state_dict_hooks(state: _FSDPState) -> None:
    """Make the unit's modules give and take full parameters. Called once, at build.

    A module gets what ``_register_state_dict_hook`` and
    ``register_load_state_dict_pre_hook`` set, less their handles and the wrapper that
    passes the module on, which took longer than all else (checked on torch 2.13 and
    2.11).
    """
    for module in state.modules:
        for at, reach in reaches(state, module):
            key = next(_keys)
            at._state_dict_hooks[key] = partial(_save, state, reach)
            at._load_state_dict_pre_hooks[key] = _Load(state, reach, at)
    state.module._state_dict_pre_hooks[next(_keys)] = partial(meet, state)


def _save(
    state: _FSDPState,
    reach: Reach,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """Put the values that the unit's setting asks for under the unit's names.

    Collective: one all-gather over the shard group (with ``rank0_only`` one gather per
    region); all its ranks must call ``state_dict()``. None for sharded values and local
    shards, and none inside ``unshard_params``.
    Raises: PhaseError, inside forward or backward; CompositionError, if units below
    are set to another type.
    """
    keys = keys_of(state, module, reach, state_dict, prefix)
    settings = settings_in_force(state)
    kind, config = settings.state_dict_type, settings.state_dict_config
    if settings is state.state_dict_settings:
        _require_one_type(module, kind)
    first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    values: dict[int, Tensor] = {}
    if keys or not reach.is_split:
        to_cpu = config.offload_to_cpu
        values = _values(state, kind, first_only=first_only, to_cpu=to_cpu)
    if kind is StateDictType.LOCAL_STATE_DICT:
        local_metadata[PLAN] = {"": plan_of(state.handle), **plans_of(module)}
    for key, slot in keys.items():
        # Names of one tied parameter share one tensor, as in the plain state dict.
        if slot.index in values:
            state_dict[key] = values[slot.index]
    if state.precision is not None:
        # As they were before mixed precision cast them.
        for name, dtype in state.precision.buffer_dtypes.items():
            key = prefix + name[len(reach.start) :]
            if name.startswith(reach.start) and key in state_dict:
                state_dict[key] = state_dict[key].to(dtype)
    # Buffers and ignored parameters, too: all that stands below the unit's module.
    below = [key for key in state_dict if key.startswith(prefix)]
    if first_only and not state.handle.groups.is_first:
        for key in below:
            del state_dict[key]
    elif config.offload_to_cpu:
        for key in below:
            if isinstance(state_dict[key], Tensor):
                state_dict[key] = state_dict[key].cpu()


def _require_one_type(module: nn.Module, kind: StateDictType) -> None:
    """Refuse one state dict of two types. Raises: CompositionError, naming a unit."""
    for fqn, _, below in walk_states(module):
        other = below.state_dict_settings.state_dict_type
        if other is not kind:
            raise CompositionError(
                f"state_dict expects one type for all units; {shown(fqn)} is set to "
                f"{other.name}, the unit it is in to {kind.name}. Call "
                "set_state_dict_type on the whole model, or state_dict on each unit "
                "alone."
            )


def _values(
    state: _FSDPState, kind: StateDictType, *, first_only: bool, to_cpu: bool
) -> dict[int, Tensor]:
    """The unit's parameters by slot index: full ones, or this rank's shards."""
    handle, context = state.handle, state.context
    if kind is StateDictType.SHARDED_STATE_DICT:
        settle(state, "state_dict")
        return sharded_values(handle, to_cpu=to_cpu)
    if kind is StateDictType.LOCAL_STATE_DICT:
        settle(state, "state_dict")
        return local_values(handle, to_cpu=to_cpu)
    if context is not None and context.summoned is not None and context.rank0_only:
        raise PhaseError(
            f"state_dict of {state.name} was called inside unshard_params("
            "rank0_only=True), where only the first rank has full parameters. Call it "
            "before or after the block, on every rank."
        )
    if handle.phase is Phase.SUMMON and handle.is_full:
        # What the modules hold, which the block may have replaced.
        return {
            info.slot_index: held.detach().clone()
            for info, (parameters, key, _, _) in zip(
                handle.infos, handle.swaps, strict=True
            )
            if (held := parameters.get(key)) is not None
        }
    settle(state, "state_dict")
    return gather_unit(handle, first_only=first_only, to_cpu=to_cpu)


_ON_META = (
    "the parameter is on meta and cannot be copied into. Call model.to_empty("
    "device=...) first, or load_state_dict(..., assign=True)."
)


class _Load:
    """The load hook of one unit: this rank's part in the place of each full value."""

    __slots__ = ("module", "reach", "state")

    def __init__(self, state: _FSDPState, reach: Reach, module: nn.Module) -> None:
        self.state, self.reach, self.module = state, reach, module

    def __call__(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Write the shards, and leave torch nothing to copy that would not fit.

        Every rank passes the same full values, its own sharded values, or its own
        shards if local is the type set; sends nothing.
        Raises: PhaseError, inside forward or backward; CheckpointError, for shards of
        another plan.
        """
        handle, module = self.state.handle, self.module
        own_plan = local_metadata.get(PLAN, {}).get("")
        plan = state_dict.pop(prefix + PLAN, own_plan)
        if handle.phase is Phase.SUMMON and handle.is_full:
            return  # the modules show full parameters: torch copies them itself
        settle(self.state, "load_state_dict")
        drop_full(self.state)
        kind = settings_in_force(self.state).state_dict_type
        local = kind is StateDictType.LOCAL_STATE_DICT
        if local:
            require_plan(handle, plan)
        for component in TRANSPARENT:
            if component in module._modules:
                # The unit is a wrapper, whose own hook has renamed the keys by now.
                prefix = f"{prefix}{component}."
        places = {
            slot.index: (region, slot, leaf)
            for region in handle.regions
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
        }
        for name, named in names_below(self.state, module, self.reach).items():
            key = prefix + name
            value = state_dict.get(key)
            if not isinstance(value, Tensor):
                continue
            if isinstance(value, LocalValue):
                value = value.plain()
            region, slot, leaf = places[named.index]
            problem = _take(handle, region, slot, leaf, value, local=local)
            if leaf.is_meta and not problem:
                if local_metadata.get("assign_to_params_buffers", False):
                    part = value
                    if isinstance(value, ShardedValue):
                        part = value.local
                    elif not local:
                        part = part_of(region, slot, value, like=leaf)
                    # Torch makes a parameter of it, and the unit takes it up.
                    state_dict[key] = part.to(leaf.dtype, copy=True)
                    continue
                problem = _ON_META
            if problem:
                error_msgs.append(f"{shown(strip_wrapper(key))}: {problem}")
            # The leaf itself: copying it is nothing, and assign=True keeps it.
            state_dict[key] = leaf


@torch.no_grad()
def _take(
    handle: FlatParamHandle,
    region: FlatParameter,
    slot: ParameterSlot,
    leaf: Tensor,
    value: Tensor,
    *,
    local: bool,
) -> str:
    """Copy into this rank's shard what is its part; say why ``value`` does not fit."""
    if isinstance(value, ShardedValue):
        problem = unfit(handle, region, slot, value)
        if not problem:
            leaf.copy_(value.local)
        return problem
    if value.shape == (1,) and slot.shape == () and not local:
        value = value[0]
    expected = tuple(leaf.shape) if local else slot.shape
    if tuple(value.shape) == expected:
        leaf.copy_(value if local else part_of(region, slot, value, like=leaf))
        return ""
    got = f"{expected}, got {tuple(value.shape)}"
    if local:
        return f"expected this rank's shard of shape {got}. Pass what this rank saved."
    return (
        f"expected the full parameter of shape {got}. Load a state dict of the plain "
        "model's shapes, on every rank."
    )
