"""The keys of a unit's parameters in a state dict, and the modules with the hooks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.planning.walk import below
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import wrapped_in


class HookScope(NamedTuple):
    """The part of a unit that the hooks on a module serve."""

    start: str = ""
    """The prefix of the unit's names there, which the module's own names do not
    have.
    """
    alone: bool = False
    """Whether the hooks serve only the module's own parameters, not its children."""
    is_split: bool = False
    """Whether several modules of the unit have hooks."""
    number: int = 0
    """The number of the unit's module that is, or contains, the module of the hooks."""


WHOLE_MODULE = HookScope()
"""The scope of nearly every unit, as one object for all units."""


def hook_scopes(
    state: _FSDPState, module: nn.Module
) -> list[tuple[nn.Module, HookScope]]:
    """Return the modules that get the hooks of a unit, with the scope of each."""
    # A class that overrides ``state_dict`` may call ``state_dict`` of a child instead
    # of the base implementation; the hooks of the class's module then do not run. So
    # the children get hooks as well, each for the part below the child.
    number = 0
    if module is not state.modules[0]:
        number = next(i for i, each in enumerate(state.modules) if each is module)
    if type(module).state_dict is nn.Module.state_dict:
        return [(module, HookScope(number=number) if number else WHOLE_MODULE)]
    # A walk of its own: modules whose class keeps ``state_dict`` are not entered.
    found, stack = [], [("", module)]
    while stack:
        path, current = stack.pop()
        start = f"{path}." if path else ""
        alone = type(current).state_dict is not nn.Module.state_dict
        reach = HookScope(start, alone=alone, is_split=True, number=number)
        # A child without parameters of the unit needs no hook.
        if current is module or names_below(state, current, reach):
            found.append((current, reach))
        if alone:
            stack += below(path, current)
    return found


def names_below(
    state: _FSDPState, module: nn.Module, reach: HookScope
) -> dict[str, ParameterSlot]:
    """Return the unit's parameters that the hooks on ``module`` serve, by name there.

    Args:
        state: The unit.
        module: The module of the hooks.
        reach: The scope of the hooks.

    Returns: slots by name; a tied parameter has several names.
    Collective: none.
    """
    start = len(reach.start)
    return {
        name[start:]: slot
        for slot in _slots(state, module)
        for name in slot.fqns
        if name.startswith(reach.start)
        and not (reach.alone and "." in name[start:])
        and _holds(state, module, slot, name[start:])
    }


def keys_of(
    state: _FSDPState,
    module: nn.Module,
    reach: HookScope,
    state_dict: dict[str, Any],
    prefix: str,
) -> dict[str, ParameterSlot]:
    """Return the keys in ``state_dict`` of the unit's parameters, with their slots.

    Args:
        state: The unit.
        module: The module of the hook.
        reach: The scope of the hook.
        state_dict: The state dict that torch has filled in.
        prefix: The prefix of the module's keys.

    Returns: slots by key.
    Collective: none.
    """
    names = names_below(state, module, reach)
    keys = {prefix + n: slot for n, slot in names.items() if prefix + n in state_dict}
    # The usual case: each name of the plan is a key.
    if len(keys) == len(names):
        return keys
    found = {slot.index for slot in keys.values()}
    lost = {slot.index: slot for slot in names.values() if slot.index not in found}
    leaves = {
        id(ref.leaf): lost[ref.slot.index]
        for ref in param_refs(state.handle)
        if ref.slot.index in lost
    }
    # A module below has passed ``state_dict`` on, so the keys are the names that
    # ``named_parameters`` gives, not the plan's: search by identity.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = prefix + strip_wrapper(name)
        if id(parameter) in leaves and key in state_dict:
            keys[key] = leaves[id(parameter)]
    return keys


def _slots(state: _FSDPState, module: nn.Module) -> list[ParameterSlot]:
    """Return the slots of the unit's parameters below ``module``."""
    slots = [slot for r in state.handle.layout.plan.regions for slot in r.parameters]
    if len(state.modules) == 1:
        return slots
    inside = set(map(id, module.modules()))
    here = {info.slot_index for info in state.handle.infos if id(info.module) in inside}
    return [slot for slot in slots if slot.index in here]


def _holds(
    state: _FSDPState, module: nn.Module, slot: ParameterSlot, name: str
) -> bool:
    """Return whether ``name`` from ``module`` is the parameter in ``slot``."""
    # Only in a unit of several modules can a name occur more than once.
    if len(state.modules) == 1:
        return True
    owner, _, key = name.rpartition(".")
    places = {
        (id(info.module), info.name)
        for info in state.handle.infos
        if info.slot_index == slot.index
    }
    return (id(_submodule(module, owner)), key) in places


def _submodule(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule of a plain name; wrappers on the way are passed through."""
    for part in [*name.split("."), ""] if name else [""]:
        while (inner := wrapped_in(module)) is not None:
            module = inner
        if part:
            module = module.get_submodule(part)
    return module
