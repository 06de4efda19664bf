"""Modules and parameters that were registered in a unit after it was made.

No unit holds them: nothing reduces their gradients, and each rank trains them on its
own. torch calls a hook wherever a module or parameter is registered, in constructors
and assignments, so what joins a unit is noted there, and the next forward or optimizer
step tells of it by name. Steps in between look whether anything was noted. Who writes
into ``_modules`` or ``_parameters`` (``ModuleList.insert`` does) passes by.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from composable_fsdp.compose.registry import other_apis
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.tree.state import OWNERS, RuntimeContext, _FSDPState

IGNORED = "_composable_fsdp_left_alone"
"""Attribute of ignored parameters: a weak reference would forbid to swap them."""
_SHOWN = 3


class _Place(NamedTuple):
    """Where something was registered: in which module, and as what."""

    module: weakref.ref[nn.Module]
    name: str


PENDING: dict[tuple[int, str], _Place] = {}
"""What was registered in units since the last forward of each."""
_watches = False


def watch_registrations() -> None:
    """Note from now on what is registered in units."""
    global _watches
    if not _watches:
        register_module_module_registration_hook(_note)
        register_module_parameter_registration_hook(_note)
        _watches = True


def _note(module: nn.Module, name: str, value: object) -> None:
    if value is not None and OWNERS.get(module) is not None:
        PENDING[id(module), name] = _Place(weakref.ref(module), name)


def warn_of_added(chosen: Callable[[_FSDPState, list[nn.Parameter]], bool]) -> None:
    """Warn of what was noted, is ``chosen``, and no unit holds. Sends nothing.

    ``chosen`` is asked with the unit and the parameters in question.
    """
    for key, place in list(PENDING.items()):
        module = place.module()
        state = None if module is None else OWNERS.get(module)
        if module is None or state is None:
            PENDING.pop(key, None)
            continue
        found = dict(_unmanaged_below(module, place.name, state))
        if chosen(state, list(found.values())):
            PENDING.pop(key, None)
            if found:
                _warn(state, module, place.name, list(found))


def warn_of_added_in_forward(context: RuntimeContext) -> None:
    """The same for the tree whose forward begins."""
    warn_of_added(lambda state, _: state.context is context)


def _unmanaged_below(
    module: nn.Module, name: str, state: _FSDPState
) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters at that place which nobody looks after, by name."""
    table = module._parameters
    if name in table:
        # A place of the unit is taken up, or refused by name.
        if not any(
            each is table and key == name
            for each, key in zip(state.handle.tables, state.handle.keys, strict=True)
        ):
            yield from _own(name, table[name])
        return
    added = module._modules.get(name)
    if added is not None:
        yield from _below(name, added)


def _below(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    # What a unit owns was there when it was made, or is noted on its own; other APIs
    # look after all that is below them.
    if OWNERS.get(module) is not None or any(other_apis(module)):
        return
    for key, parameter in module._parameters.items():
        yield from _own(join_name(name, key), parameter)
    for key, child in module._modules.items():
        if child is not None:
            yield from _below(join_name(name, key), child)


def _own(name: str, parameter: Any) -> Iterator[tuple[str, nn.Parameter]]:
    if (
        parameter is not None
        and parameter.requires_grad
        and not hasattr(parameter, IGNORED)
        and find_leaf(parameter) is None
        and find_flat(parameter) is None
    ):
        yield name, parameter


def _warn(
    state: _FSDPState, module: nn.Module, name: str, parameters: list[str]
) -> None:
    paths = (
        join_name(state.fqn, path)
        for top in state.modules
        for path, each in top.named_modules()
        if each is module
    )
    path = next(paths, "")
    names = ", ".join(quoted(join_name(path, each)) for each in parameters[:_SHOWN])
    more = f" and {len(parameters) - _SHOWN} more" if parameters[_SHOWN:] else ""
    added = module._modules.get(name)
    kind = "Parameter" if added is None else type(added).__name__
    way = (
        "put it into a module of its own, and that"
        if added is None
        else "give the module"
    )
    warnings.warn(
        f"{kind} {quoted(join_name(path, name))} was registered after fully_shard, in "
        "the "
        f"fully sharded module {state.name}, and no unit holds {names}{more}: nothing "
        "reduces their gradients, and the ranks drift apart. Register it before "
        f"fully_shard, or {way} to replicate or fully_shard before its first forward.",
        stacklevel=2,
    )
