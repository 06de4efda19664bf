"""Which keys of a state dict are a unit's parameters, and where its hooks belong."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from composable_fsdp.naming import TRANSPARENT, strip_wrapper
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import wrapped_in


class HookScope(NamedTuple):
    """What the hooks on a module see of a unit."""

    start: str = ""
    """What the unit's names begin with there, and the module's own do not."""
    alone: bool = False
    """Only what the module holds itself; its children have hooks of their own."""
    is_split: bool = False
    """Whether several modules of the unit's module have hooks."""


_ALL = HookScope()


def hook_scopes(
    state: _FSDPState, module: nn.Module
) -> list[tuple[nn.Module, HookScope]]:
    """Where the hooks of a unit belong: on its module, unless that passes calls on.

    A class with a ``state_dict`` of its own may call that of a child, and its own hooks
    are then not run; so its children have some as well, each for what is below it.
    """
    if type(module).state_dict is nn.Module.state_dict:
        return [(module, _ALL)]
    found, stack = [], [("", module)]
    while stack:
        start, current = stack.pop()
        alone = type(current).state_dict is not nn.Module.state_dict
        reach = HookScope(start, alone=alone, is_split=True)
        if current is module or names_below(state, current, reach):
            found.append((current, reach))
        for name, child in current._modules.items() if alone else ():
            if child is not None:
                inside = start if name in TRANSPARENT else f"{start}{name}."
                stack.append((inside, child))
    return found


def names_below(
    state: _FSDPState, module: nn.Module, reach: HookScope
) -> dict[str, ParameterSlot]:
    """The unit's parameters that the hooks on ``module`` see, by their names there."""
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
    """The keys in ``state_dict`` under which the unit's parameters stand.

    Where a module below has passed the call on, they are the names that it gives.
    """
    names = names_below(state, module, reach)
    keys = {prefix + n: slot for n, slot in names.items() if prefix + n in state_dict}
    if len(keys) == len(names):
        return keys
    found = {slot.index for slot in keys.values()}
    lost = {slot.index: slot for slot in names.values() if slot.index not in found}
    leaves = {
        id(leaf): lost[slot.index]
        for region in state.handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
        if slot.index in lost
    }
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = prefix + strip_wrapper(name)
        if id(parameter) in leaves and key in state_dict:
            keys[key] = leaves[id(parameter)]
    return keys


def _slots(state: _FSDPState, module: nn.Module) -> list[ParameterSlot]:
    """The unit's parameters below ``module``; all of them unless the unit is a list."""
    slots = [slot for r in state.handle.plan.regions for slot in r.parameters]
    if len(state.modules) == 1:
        return slots
    inside = set(map(id, module.modules()))
    here = {info.slot_index for info in state.handle.infos if id(info.module) in inside}
    return [slot for slot in slots if slot.index in here]


def _holds(
    state: _FSDPState, module: nn.Module, slot: ParameterSlot, name: str
) -> bool:
    """Whether ``name`` from ``module`` is this parameter: in a list, names repeat."""
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
    """The submodule of that plain name; wrappers are gone through."""
    for part in [*name.split("."), ""] if name else [""]:
        while (inner := wrapped_in(module)) is not None:
            module = inner
        if part:
            module = module.get_submodule(part)
    return module
