"""State dicts of a module inside a unit: whole values, as those of the unit.

``model.encoder.state_dict()``, where the unit is above ``encoder``, runs no hook of the
unit. So its parts have hooks of their own, which leave everything to the unit's where
the call came from above::

    model.state_dict()             unit's hook            parts' hooks do nothing
    model.encoder.state_dict()     hook of ``encoder``    parts below do nothing
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from composable_fsdp.naming import join_name, strip_wrapper
from composable_fsdp.phases import Phase
from composable_fsdp.planning import walk
from composable_fsdp.runtime.recover import free_all_full_params, require_between_steps
from composable_fsdp.state_dict.barrier import barrier_before_gather
from composable_fsdp.state_dict.hooks import write_unit_values
from composable_fsdp.state_dict.loading import is_loadable, require_values, take_values
from composable_fsdp.state_dict.unit_keys import HookScope, hook_scopes
from composable_fsdp.tree.state import OWNERS, _FSDPState

_PART = -1 << 20
"""Key of our hooks, apart from those of units. Torch numbers from 0 up."""


def install_part_hooks(state: _FSDPState, members: Iterable[nn.Module]) -> None:
    """Make modules of the unit give and take full parameters. Called once, at build.

    ``members``: all modules in the unit's tree. Its own, and those to which it passes
    calls on, have the unit's hooks. Nothing to do where nothing is cut.
    """
    handle = state.handle
    if handle.groups.shard is None:
        return
    others = {id(at) for top in state.modules for at, _ in hook_scopes(state, top)}
    owners = set(map(id, handle.owners))
    for module in members:
        if OWNERS.get(module) is not state or id(module) in others:
            continue
        if module._modules or id(module) in owners:
            hooks: Any = module._state_dict_hooks
            hooks[_PART] = _save_part
        if id(module) in owners:
            module._load_state_dict_pre_hooks[_PART] = _LoadPart(module)


def _save_part(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """Put the values that the unit's setting asks for under the part's names.

    Unless the call came from the unit or from another part: their hooks do it.

    Collective, Raises: as the hook of the unit.
    """
    state = OWNERS.get(module)
    if state is None or _is_called_by(state, sys._getframe(1), state_dict):
        return  # without a state, a copy of a part alone
    places, keys = _places(state), {}
    for name, owner in module.named_modules(remove_duplicate=False):
        for key in owner._parameters:
            index = places.get((id(owner), key))
            full_key = prefix + strip_wrapper(join_name(name, key))
            if index is not None and full_key in state_dict:
                keys[full_key] = index
    if keys:
        barrier_before_gather(state, module, prefix, keep_vars=False)
    reach = HookScope(_start(state, module), is_split=True)
    write_unit_values(state, reach, module, keys, state_dict, prefix, local_metadata)


def _places(state: _FSDPState) -> dict[tuple[int, str], int]:
    """The slots of the unit's parameters by identity of their owner, and key there."""
    return {
        (id(info.module), info.name): info.slot_index for info in state.handle.infos
    }


def _start(state: _FSDPState, module: nn.Module) -> str:
    """What the unit's names of this part begin with."""
    for top in state.modules:
        try:
            return strip_wrapper(walk.name_of(top, module)) + "."
        except KeyError:
            continue  # of another module of a list, or held elsewhere since
    return ""


def _is_called_by(
    state: _FSDPState, frame: FrameType | None, state_dict: dict[str, Any]
) -> bool:
    """Whether a module of the unit above fills the same ``state_dict``.

    ``frame`` is the call of ``nn.Module.state_dict`` that runs the part's hook; names
    in it checked on torch 2.13 and 2.11. A module that holds the part without being of
    its unit has no hook, and names in the dict do not tell the two apart.
    """
    assert frame is not None
    frame = frame.f_back
    while frame is not None:
        if frame.f_code is nn.Module.state_dict.__code__:
            if frame.f_locals.get("destination") is not state_dict:
                return False
            if OWNERS.get(frame.f_locals["self"]) is state:
                return True
        frame = frame.f_back
    return False


class _LoadPart:
    """The load hook of a part: this rank's rows in the place of each full value."""

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
        """Write the shards, unless the unit's hook has. Sends nothing.

        Raises: PhaseError, inside forward or backward; CheckpointError, for values on
        meta.
        """
        state, own = OWNERS.get(self.module), self.module._parameters
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
        if handle.phase is Phase.SUMMON and handle.is_full:
            return
        if not handle.on_meta:  # else some parts have values, and others get theirs
            require_between_steps(state, "load_state_dict")
            free_all_full_params(state)
        places = _places(state)
        slots = {
            prefix + key: places[id(self.module), key]
            for key in given
            if (id(self.module), key) in places
        }
        require_values(self.module, state_dict, prefix)
        take_values(state, slots, state_dict, local_metadata, error_msgs)
