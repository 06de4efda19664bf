"""A warning of parameters that were registered in a unit after build.

No unit holds them: nothing reduces their gradients, and each rank trains its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from composable_fsdp.compose.registry import other_apis
from composable_fsdp.errors import warn
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.optim.step_checks import is_unmanaged
from composable_fsdp.planning import walk
from composable_fsdp.tree.moments import NEXT_FORWARD
from composable_fsdp.tree.state import OWNERS, RuntimeContext, _FSDPState, root_of

PENDING: WeakKeyDictionary[_FSDPState, list[ref[nn.Module | nn.Parameter]]] = (
    WeakKeyDictionary()
)
"""What was registered since the last forward of each tree, by unit. Empty in the steady
state."""


@cache
def watch_registrations() -> None:
    """Record registrations in units from now on; for the rest of the process."""
    register_module_module_registration_hook(_note)
    register_module_parameter_registration_hook(_note)


def _note(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
    """Registration hook: record the registration if a unit holds ``module``."""
    state = OWNERS.get(module)
    # Programs may assign parameters in each step, and the search is one of the tree.
    if value is not None and state is not None and not _is_place(module, name):
        PENDING.setdefault(state, []).append(ref(value))
        if _warn_of_added not in NEXT_FORWARD:
            NEXT_FORWARD.append(_warn_of_added)


def _is_place(module: nn.Module, name: str) -> bool:
    """Return whether a new parameter there is adopted by its unit, or refused."""
    state = OWNERS.get(module)
    layout = None if state is None else state.handle.layout
    return layout is not None and any(
        table is module._parameters and key == name
        for table, key in zip(layout.tables, layout.keys, strict=True)
    )


def _warn_of_added(context: RuntimeContext) -> None:
    """Warn of parameters in this tree that no unit holds, if any was registered."""
    grown = [state for state in PENDING if state.context is context]
    links = [link for state in grown for link in PENDING.pop(state)]
    if not PENDING:
        NEXT_FORWARD.remove(_warn_of_added)
    # No others: those were told already, or are in an ignored module.
    added = {
        id(parameter)
        for each in (link() for link in links)
        for parameter in (each.parameters() if isinstance(each, nn.Module) else (each,))
    }
    names = list(_unmanaged(context, added)) if added else []
    if names:
        warn(
            f"Parameters {listed(map(quoted, names))} were registered after "
            "fully_shard, and no unit holds them: nothing reduces gradients there, and "
            "the ranks drift apart. Register them before fully_shard, or give their "
            "module to replicate or fully_shard before its first forward.",
        )


def _unmanaged(context: RuntimeContext, added: set[int]) -> Iterator[str]:
    """Yield the names of trainable parameters of ``added`` that no unit holds."""
    top: nn.Module = root_of(context).module

    def is_ours(module: nn.Module) -> bool:
        # Another API (DDP, torch's FSDP) manages the whole subtree of its module.
        return OWNERS.get(module) is not None or not any(other_apis(module))

    for path, each in walk.named(top, enter=is_ours):
        for key, parameter in each._parameters.items():
            if (
                parameter is not None
                and id(parameter) in added
                and is_unmanaged(parameter)
                and not _is_place(each, key)
            ):
                yield join_name(path, key)
