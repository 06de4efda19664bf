"""State dict hooks of units: ``module.state_dict()`` and ``module.load_state_dict()``.

The hooks are on the fully sharded modules, so the calls work on any module that holds a
unit, with the keys of the plain model::

    state_dict        torch fills in the subtree      _save: shards -> full values
    load_state_dict   _Load: full values -> shards    torch copies the remaining values

The unit's settings (``settings.py``) may select shards, host memory, or a single rank.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import count
from types import MethodType
from typing import Any

from torch import Tensor, nn

from composable_fsdp.config import FullStateDictConfig, StateDictType
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.dtensor_params import refuse_forms
from composable_fsdp.flat.experts import require_all_data
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import TRANSPARENT, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.runtime.recover import free_all_full_params, require_between_steps
from composable_fsdp.state_dict import dcp_caller
from composable_fsdp.state_dict.all_experts import add_other_experts
from composable_fsdp.state_dict.barrier import (
    barrier_before_gather,
    barrier_before_load,
)
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
from composable_fsdp.state_dict.open_calls import begin_call, end_call
from composable_fsdp.state_dict.sharded import sharded_values
from composable_fsdp.state_dict.unit_keys import (
    HookScope,
    hook_scopes,
    keys_of,
    names_below,
)
from composable_fsdp.tree.root import outermost
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states

_keys = count(-1, -1)
"""Keys of the hooks of this package: negative, because torch counts from 0 up. A
counter, because a module may have hooks of two units.
"""


def install_state_dict_hooks(state: _FSDPState) -> set[int]:
    """Install the save and load hooks on the unit's modules. Called once, at build.

    Returns: the ids of the modules that got hooks. Collective: none.
    """
    # DCP's functions must be wrapped before DCP first calls a state dict of this model.
    dcp_caller.install()
    served: set[int] = set()
    for module in state.modules:
        for at, reach in hook_scopes(state, module):
            key = next(_keys)
            served.add(id(at))
            # Direct entries, as ``_register_state_dict_hook`` and
            # ``register_load_state_dict_pre_hook`` make them (checked on torch 2.13 and
            # 2.11). Their removable handles and wrapper functions took most of the
            # build time here.
            at._state_dict_hooks[key] = partial(_save, state, reach)
            at._load_state_dict_pre_hooks[key] = _Load(state, reach, at)
            # A bound method is one object for the garbage collector, and a partial two.
            at._state_dict_pre_hooks[key] = MethodType(_begin, state)
    # The barrier runs before torch walks the subtree: once per call, and before the
    # first gather.
    barrier = MethodType(barrier_before_gather, state)
    state.module._state_dict_pre_hooks[next(_keys)] = barrier
    return served


def _begin(state: _FSDPState, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Record the call, for the hooks of modules inside the unit (``parts``)."""
    begin_call(state, prefix, sys._getframe(1))


def _save(
    state: _FSDPState,
    reach: HookScope,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """Replace the unit's entries in ``state_dict`` by the values of the unit's setting.

    Collective: an all-gather over the shard group (with ``rank0_only`` a gather per
        region); all its ranks must call ``state_dict()``. None for sharded values and
        local shards, and none inside ``unshard_params``.
    Raises: PhaseError, inside forward or backward; CompositionError, if units below
        have another type.
    """
    end_call(sys._getframe(1))
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
    """Write values under ``keys``; apply the settings to the other entries below, too.

    Args:
        state: The unit.
        reach: The part of the unit that the hook serves.
        module: The module of the hook.
        keys: The keys in ``state_dict`` of the unit's parameters, with their slot
            indices.
        state_dict: The state dict that torch has filled in.
        prefix: The prefix of the keys of ``module``.
        local_metadata: torch's metadata of ``module``.

    Collective, Raises: as ``_save``.
    """
    settings = effective_settings(state)
    kind, config = settings.state_dict_type, settings.state_dict_config
    # A request of DCP is the same for all units; the units' own settings may differ.
    if settings is state.settings.state_dict:
        _require_one_type(module, kind)
    # Local shards are a rank's own.
    if kind is not StateDictType.LOCAL_STATE_DICT:
        require_all_data(state.handle, outermost(state).handle, "state_dict")
    first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    values: dict[int, Tensor] = {}
    # If several modules of the unit have hooks, a hook that serves none of the
    # parameters does not gather.
    if keys or not reach.is_split:
        to_cpu = config.offload_to_cpu
        values = _values(state, kind, first_only=first_only, to_cpu=to_cpu)
    if kind is StateDictType.LOCAL_STATE_DICT:
        # torch.save stores the metadata with the state dict.
        local_metadata[PLAN] = {"": plan_of(state.handle), **plans_of(module)}
    for key, index in keys.items():
        # The names of a tied parameter share a tensor, as in the plain state dict.
        if index in values:
            state_dict[key] = values[index]
    if state.precision is not None:
        # Buffers get the dtype back that they had before mixed precision cast them.
        for (number, name), dtype in state.precision.buffer_dtypes.items():
            key = prefix + name[len(reach.start) :]
            is_here = number == reach.number and name.startswith(reach.start)
            if is_here and key in state_dict:
                state_dict[key] = state_dict[key].to(dtype)
    if state.handle.groups.experts is not None:
        add_other_experts(
            state, module, prefix, keys, state_dict, kind, first_only=first_only
        )
    # Buffers and ignored parameters, too: all entries below the unit's module.
    below = [key for key in state_dict if key.startswith(prefix)]
    # With rank0_only the other ranks return no entry of the subtree.
    if first_only and not state.handle.groups.is_first:
        for key in below:
            del state_dict[key]
    # The unit's values are in host memory already; buffers may not be.
    elif config.offload_to_cpu:
        for key in below:
            if isinstance(state_dict[key], Tensor):
                state_dict[key] = state_dict[key].cpu()


def _require_one_type(module: nn.Module, kind: StateDictType) -> None:
    """Refuse a state dict of two types.

    Raises: CompositionError, naming a unit of another type.
    """
    # A mixture of full values and shards could not be loaded under any type.
    for fqn, _, below in walk_states(module):
        other = below.settings.state_dict.state_dict_type
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
    """Return the unit's parameters by slot index: full values, or this rank's shards.

    Collective, Raises: as ``_save``.
    """
    handle, context = state.handle, state.context
    if kind is StateDictType.SHARDED_STATE_DICT:
        require_between_steps(state, "state_dict")
        return sharded_values(handle, to_cpu=to_cpu)
    if kind is StateDictType.LOCAL_STATE_DICT:
        require_between_steps(state, "state_dict")
        return local_values(handle, to_cpu=to_cpu)
    # Other ranks have sharded parameters in their modules and cannot gather inside a
    # block.
    summoned = None if context is None else context.summoned
    if summoned is not None and summoned.rank0_only:
        raise PhaseError(
            f"state_dict of {state.name} was called inside unshard_params("
            "rank0_only=True), where only the first rank has full parameters. Call it "
            "before or after the block, on every rank."
        )
    if handle.phase is Phase.SUMMON and handle.is_full:
        # The tensors in the modules, because the block may have replaced parameters.
        shown = {
            info.slot_index: held
            for info, (parameters, key, _, _) in zip(
                handle.infos, handle.swaps, strict=True
            )
            if (held := parameters.get(key)) is not None
        }
        return {index: _whole(handle, index, shown[index]) for index in sorted(shown)}
    require_between_steps(state, "state_dict")
    return gather_unit(handle, first_only=first_only, to_cpu=to_cpu)


def _whole(handle: FlatParamHandle, index: int, held: Tensor) -> Tensor:
    """Return a copy of a full parameter that a block shows, of the plain model's shape.

    Collective: over tensor-parallel ranks, if the parameter is cut.
    """
    # Inside a block the modules show DTensors, whole over the data ranks alone.
    form = handle.layout.forms.get(index)
    value = held.detach().clone()
    return value if form is None else form.whole(local_of(value))


class _Load:
    """The load hook of a unit: replaces each full value by this rank's part."""

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
        """Write the unit's shards; leave torch only entries that fit the shards.

        Every rank passes the same full values, or the rank's own sharded values, or
        (type LOCAL_STATE_DICT) the rank's own shards.

        Args:
            state_dict: The state dict; entries of the unit are replaced.
            prefix: The prefix of the module's keys.
            local_metadata: torch's metadata of the module, with the plan of local
                shards.
            strict: torch's argument; unused.
            missing_keys: torch's list; unused.
            unexpected_keys: torch's list; unused.
            error_msgs: torch's list of errors; values that do not fit are added.

        Collective: none, but all ranks must call.
        Raises: PhaseError, inside forward or backward; CheckpointError, for shards of
            another plan, or for values on meta; DesyncError, if another rank does not
            load.
        """
        handle, module = self.state.handle, self.module
        own_plan = local_metadata.get(PLAN, {}).get("")
        # Below a wrapper the plan is an entry of the state dict (see ``wrapper_keys``);
        # torch would report that key as unexpected.
        plan = state_dict.pop(prefix + PLAN, own_plan)
        if handle.phase is Phase.SUMMON and handle.is_full:
            refuse_forms([handle], "load_state_dict inside unshard_params")
            return  # torch copies into the full parameters itself
        require_between_steps(self.state, "load_state_dict")
        barrier_before_load(self.state, error_msgs)
        # An unsharded unit would keep showing the old values.
        free_all_full_params(self.state)
        if is_local(self.state):
            require_plan(handle, plan)
        # The wrapper's own hook runs before this hook and has inserted the component.
        for component in TRANSPARENT:
            if component in module._modules:
                prefix = f"{prefix}{component}."
        slots = {
            prefix + name: slot.index
            for name, slot in names_below(self.state, module, self.reach).items()
        }
        # Before the first write, so that a refusal changes no value of this unit.
        require_values(module, state_dict, prefix)
        take_values(self.state, slots, state_dict, local_metadata, error_msgs)
