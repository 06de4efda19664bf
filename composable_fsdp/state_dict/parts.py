"""State dicts of a module inside a unit: full values, as in the unit's state dict.

``model.encoder.state_dict()`` does not run the hooks of a unit above ``encoder``. So
the modules inside a unit (its parts) have hooks, too, which do nothing if the call came
from above::

    model.state_dict()             unit's hook            parts' hooks do nothing
    model.encoder.state_dict()     hook of ``encoder``    parts below do nothing
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor, nn

from composable_fsdp.naming import join_name, strip_wrapper
from composable_fsdp.phases import Phase
from composable_fsdp.planning import walk
from composable_fsdp.runtime.recover import free_all_full_params, require_between_steps
from composable_fsdp.state_dict.barrier import barrier_before_gather, meet_to_load
from composable_fsdp.state_dict.hooks import write_unit_values
from composable_fsdp.state_dict.loading import is_loadable, require_values, take_values
from composable_fsdp.state_dict.open_calls import begin_call, end_call, is_inside_call
from composable_fsdp.state_dict.unit_keys import HookScope
from composable_fsdp.tree.state import OWNERS, _FSDPState

_PART = -1 << 20
"""Key of the hooks of parts, far below the keys of units. torch counts from 0 up."""


def install_part_hooks(
    state: _FSDPState, members: Iterable[nn.Module], served: Container[int]
) -> None:
    """Install hooks on the parts of the unit. Called once, at build.

    Args:
        state: the unit.
        members: all modules of the unit.
        served: the ids of modules that have the unit's hooks instead: the unit's own
            modules, and modules to which they pass ``state_dict()`` on.

    Collective: none.
    """
    handle = state.handle
    # Without a shard group every module holds full values.
    if handle.groups.shard is None and not handle.layout.forms:
        return
    owners = set(map(id, handle.layout.owners))
    for module in members:
        key = id(module)
        if key in served or OWNERS.get(module) is not state:
            continue
        # A module without children that owns no parameter of the unit has no entry to
        # replace.
        if module._modules or key in owners:
            # Direct entries, as in ``install_state_dict_hooks``.
            hooks: Any = module._state_dict_hooks
            hooks[_PART] = _save_part
            module._state_dict_pre_hooks[_PART] = _begin_part
        # torch calls load hooks module by module, so only modules with own parameters
        # need a hook.
        if key in owners:
            module._load_state_dict_pre_hooks[_PART] = _LoadPart(module)


def _begin_part(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Record the call, for the hooks of the parts below."""
    state = OWNERS.get(module)
    if state is not None:  # None: a deep copy of a part without its unit
        begin_call(state, prefix, sys._getframe(1))


def _save_part(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """Replace the part's entries in ``state_dict`` by the values of the unit's setting.

    If the call came from the unit or from another part, the caller's hook does so.

    Collective, Raises: as the unit's hook.
    """
    end_call(sys._getframe(1))
    state = OWNERS.get(module)
    if state is None or is_inside_call(state, prefix, state_dict):
        return  # no state: a deep copy of a part without its unit
    places, keys = _places(state), {}
    for name, owner in module.named_modules(remove_duplicate=False):
        for key in owner._parameters:
            index = places.get((id(owner), key))
            full_key = prefix + strip_wrapper(join_name(name, key))
            if index is not None and full_key in state_dict:
                keys[full_key] = index
    # The unit's pre-hook with the barrier did not run, so wait here, before the gather.
    if keys:
        barrier_before_gather(state, module, prefix, keep_vars=False)
    # ``is_split``, because other parts have hooks, too: without keys do not gather.
    reach = _scope(state, module)
    write_unit_values(state, reach, module, keys, state_dict, prefix, local_metadata)


def _places(state: _FSDPState) -> dict[tuple[int, str], int]:
    """Return the slots of the unit's parameters, by identity of the owner and key."""
    return {
        (id(info.module), info.name): info.slot_index for info in state.handle.infos
    }


def _scope(state: _FSDPState, module: nn.Module) -> HookScope:
    """Return the scope of the hooks of this part."""
    for number, top in enumerate(state.modules):
        try:
            start = walk.name_of(top, module) + "."
        except KeyError:
            continue  # in another module of the unit, or moved to another place
        return HookScope(start, is_split=True, number=number)
    return HookScope(is_split=True)


class _LoadPart:
    """The load hook of a part: replaces each full value by this rank's part."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

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
        """Write the shards, unless the unit's hook has done so.

        Args:
            state_dict: The state dict; entries of the part are replaced.
            prefix: The prefix of the module's keys.
            local_metadata: torch's metadata of the module.
            strict: torch's argument; unused.
            missing_keys: torch's list; unused.
            unexpected_keys: torch's list; unused.
            error_msgs: torch's list of errors; values that do not fit are added.

        Collective: none.
        Raises: PhaseError, inside forward or backward; CheckpointError, for values on
            meta.
        """
        state, own = OWNERS.get(self.module), self.module._parameters
        # The unit's hook replaces entries by the parameters themselves or by noted
        # parts; both are finished.
        given = {
            key: value
            for key in own
            if isinstance(value := state_dict.get(prefix + key), Tensor)
            and value is not own[key]
            and not is_loadable(value)
        }
        if state is None or not given:
            return
        handle = state.handle
        # The modules show full parameters, into which torch copies itself.
        if handle.phase is Phase.SUMMON and handle.is_full:
            return
        # While the unit is on meta, some parts may have values already and others not
        # yet.
        if not handle.layout.on_meta:
            require_between_steps(state, "load_state_dict")
            free_all_full_params(state)
        meet_to_load(state)
        places = _places(state)
        slots = {
            prefix + key: places[id(self.module), key]
            for key in given
            if (id(self.module), key) in places
        }
        require_values(self.module, state_dict, prefix)
        take_values(state, slots, state_dict, local_metadata, error_msgs)
