"""A warning of modules and parameters that were registered in a unit after build.

No unit holds them: nothing reduces their gradients, and each rank trains its own. torch
calls a hook for every registration, and the next forward of the tree warns by name.
Code that writes into ``_modules`` or ``_parameters`` directly is not noticed.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from composable_fsdp.compose.registry import other_apis
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.planning import walk
from composable_fsdp.tree.moments import NEXT_FORWARD
from composable_fsdp.tree.root import outermost
from composable_fsdp.tree.state import OWNERS, RuntimeContext, _FSDPState
from composable_fsdp.tree.unit_settings import IGNORED

PENDING: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
"""Modules of registrations in units since the last forward of each tree, by id of the
module and name. Empty in the steady state."""
_watches = False


def watch_registrations() -> None:
    """Record registrations in units from now on; for the rest of the process."""
    global _watches
    if not _watches:
        register_module_module_registration_hook(_note)
        register_module_parameter_registration_hook(_note)
        _watches = True


def _note(module: nn.Module, name: str, value: object) -> None:
    """Registration hook: record the registration if a unit holds ``module``."""
    if value is not None and OWNERS.get(module) is not None:
        if not PENDING:
            NEXT_FORWARD.append(_warn_of_added)
        PENDING[id(module), name] = weakref.ref(module)


def _warn_of_added(context: RuntimeContext) -> None:
    """Warn of registrations in this tree that no unit holds, and forget them."""
    # A copy, because entries are removed in the loop.
    for key, link in list(PENDING.items()):
        module, name = link(), key[1]
        state = None if module is None else OWNERS.get(module)
        if state is not None and state.context is not context:
            continue
        del PENDING[key]
        # Else the module was deleted, or has left the unit.
        if module is not None and state is not None:
            found = _unmanaged(state, module, name)
            if found:
                _warn(state, module, name, found)
    if not PENDING:
        NEXT_FORWARD.remove(_warn_of_added)


def _unmanaged(state: _FSDPState, module: nn.Module, name: str) -> list[str]:
    """Return names of trainable parameters of the registration that no unit holds."""
    added, layout = module._modules.get(name), state.handle.layout
    found: dict[str, Any] = {}
    if added is not None:
        for path, each in walk.named(added, enter=_is_free, every_path=True):
            for key, parameter in each._parameters.items():
                found[join_name(name, join_name(path, key))] = parameter
    # A new parameter at a place of the unit is adopted, or refused by name.
    elif not any(
        table is module._parameters and key == name
        for table, key in zip(layout.tables, layout.keys, strict=True)
    ):
        found[name] = module._parameters.get(name)
    return [
        name
        for name, parameter in found.items()
        if parameter is not None
        and parameter.requires_grad
        and not hasattr(parameter, IGNORED)
        and find_leaf(parameter) is None
        and find_flat(parameter) is None
    ]


def _is_free(module: nn.Module) -> bool:
    """Return whether no unit and no other API manages the module."""
    # A module with an owner existed when the unit was built, or has a record of its
    # own; other APIs (DDP, ``replicate``) manage the whole subtree of their module.
    return OWNERS.get(module) is None and not any(other_apis(module))


def _warn(
    state: _FSDPState, module: nn.Module, name: str, parameters: list[str]
) -> None:
    """Warn that no unit holds ``parameters`` of a registration."""
    # A unit of several modules has no module that holds all its parts.
    top, fqn = state.module, state.fqn
    if len(state.modules) > 1:
        top, fqn = outermost(state).module, ""
    paths = (join_name(fqn, path) for path, each in walk.named(top) if each is module)
    path = next(paths, "")
    names = listed(quoted(join_name(path, each)) for each in parameters)
    added = module._modules.get(name)
    kind = "Parameter" if added is None else type(added).__name__
    way = "give the module" if added is not None else "put it into a module, and that"
    warnings.warn(
        f"{kind} {quoted(join_name(path, name))} was registered after fully_shard, in "
        f"the fully sharded module {state.name}, and no unit holds {names}: nothing "
        "reduces gradients there, and the ranks drift apart. Register it before "
        f"fully_shard, or {way} to replicate or fully_shard before its first forward.",
        stacklevel=2,
    )
