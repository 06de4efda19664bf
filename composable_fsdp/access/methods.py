"""Methods other than ``forward`` that compute with a unit's parameters."""

from __future__ import annotations

import functools
import inspect

from torch import nn

from composable_fsdp.errors import CompositionError
from composable_fsdp.runtime.hooks import call_method
from composable_fsdp.tree.state import _get_module_fsdp_state
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    _get_unit_state,
    inside_wrappers,
    no_unit,
    require_module,
)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.name(...)`` gather and reshard, as ``module(...)`` does.

    ``module`` is a fully sharded module, or a wrapper around one. The method may call
    the forward, of ``module`` or of units below; its inputs and outputs are those of a
    forward for autograd. Registered again it stays as it is, and ``"forward"`` needs
    none. On a module that has nothing to do with sharding nothing happens, so that a
    script also runs unsharded.

    Collective: none; each call of the method then issues those of a forward.
    Raises: CompositionError, if there is no such method, it is a generator or
    coroutine, or ``module`` is in a sharded model without being a unit itself.

    >>> register_forward_method(model, "generate")
    """
    require_module(module, "register_forward_method")
    module = inside_wrappers(module)
    method = getattr(module, name, None)
    if not callable(method):
        raise CompositionError(
            f"register_forward_method expects the name of a method; "
            f"{type(module).__name__} has no method {name!r}. Check the name, or pass "
            "the module that has it."
        )
    state = _get_unit_state(module)
    if state is None:
        _require_plain(module, name)
        return
    if name == "forward" or getattr(method, "func", None) is call_method:
        return
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise CompositionError(
            f"{type(module).__name__}.{name} is a generator or a coroutine: its body "
            "would run after the unit is sharded again. Register the method that "
            "computes one result, and call that from it."
        )
    hooked = functools.partial(call_method, state, module, method)
    setattr(module, name, functools.update_wrapper(hooked, method))


register_fsdp_forward_method = register_forward_method
"""The name that torch has for it."""


def _require_plain(module: nn.Module, name: str) -> None:
    if _get_module_fsdp_state(module) is not None or _get_fsdp_states(module):
        raise no_unit(module, f"register_forward_method({name!r})", recurse=False)
