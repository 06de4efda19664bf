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

from torch import Tensor, nn

from composable_fsdp.config import FullStateDictConfig, StateDictType
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.naming import TRANSPARENT, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.recover import free_all_full_params, require_between_steps
from composable_fsdp.state_dict import dcp_caller
from composable_fsdp.state_dict.barrier import barrier_before_gather
from composable_fsdp.state_dict.effective_settings import effective_settings
from composable_fsdp.state_dict.full import gather_unit
from composable_fsdp.state_dict.loading import is_local, require_values, take_values
from composable_fsdp.state_dict.local import (
    PLAN,
    local_values,
    plan_of,
    plans_of,
    require_plan,
)
from composable_fsdp.state_dict.sharded import sharded_values
from composable_fsdp.state_dict.unit_keys import (
    HookScope,
    hook_scopes,
    keys_of,
    names_below,
)
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
    dcp_caller.install()
    for module in state.modules:
        for at, reach in hook_scopes(state, module):
            key = next(_keys)
            at._state_dict_hooks[key] = partial(_save, state, reach)
            at._load_state_dict_pre_hooks[key] = _Load(state, reach, at)
    state.module._state_dict_pre_hooks[next(_keys)] = partial(
        barrier_before_gather, state
    )


def _save(
    state: _FSDPState,
    reach: HookScope,
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
    slots = keys_of(state, module, reach, state_dict, prefix)
    keys = {key: slot.index for key, slot in slots.items()}
    write_unit_values(state, reach, module, keys, state_dict, prefix, local_metadata)


def write_unit_values(
    state: _FSDPState,
    reach: HookScope,
    module: nn.Module,
    keys: dict[str, int],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """Put values under ``keys``, given with their slots; treat what is not the unit's.

    Collective, Raises: as ``_save``.
    """
    settings = effective_settings(state)
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
    for key, index in keys.items():
        # Names of one tied parameter share one tensor, as in the plain state dict.
        if index in values:
            state_dict[key] = values[index]
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
                f"state_dict expects one type for all units; {quoted(fqn)} is set to "
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
        require_between_steps(state, "state_dict")
        return sharded_values(handle, to_cpu=to_cpu)
    if kind is StateDictType.LOCAL_STATE_DICT:
        require_between_steps(state, "state_dict")
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
    require_between_steps(state, "state_dict")
    return gather_unit(handle, first_only=first_only, to_cpu=to_cpu)


class _Load:
    """The load hook of one unit: this rank's part in the place of each full value."""

    __slots__ = ("module", "reach", "state")

    def __init__(self, state: _FSDPState, reach: HookScope, module: nn.Module) -> None:
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
        another plan, or for values on meta.
        """
        handle, module = self.state.handle, self.module
        own_plan = local_metadata.get(PLAN, {}).get("")
        plan = state_dict.pop(prefix + PLAN, own_plan)
        if handle.phase is Phase.SUMMON and handle.is_full:
            return  # the modules show full parameters: torch copies them itself
        require_between_steps(self.state, "load_state_dict")
        free_all_full_params(self.state)
        if is_local(self.state):
            require_plan(handle, plan)
        for component in TRANSPARENT:
            if component in module._modules:
                # The unit is a wrapper, whose own hook has renamed the keys by now.
                prefix = f"{prefix}{component}."
        slots = {
            prefix + name: slot.index
            for name, slot in names_below(self.state, module, self.reach).items()
        }
        require_values(module, state_dict, prefix)
        take_values(self.state, slots, state_dict, local_metadata, error_msgs)
