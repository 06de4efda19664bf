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
    """Make ``module.name(...)`` unshard and reshard the unit, as ``module(...)`` does.

    The method may call the forward of ``module`` or of units below. Autograd treats the
    method's inputs and outputs as inputs and outputs of a forward. Registration of a
    registered method, or of ``"forward"``, does nothing. So does a module that has
    nothing to do with sharding; a script therefore also runs unsharded.

    Args:
        module: A fully sharded module, or a wrapper around such a module.
        name: The name of the method.

    Collective: none; each call of the method issues the collectives of a forward.
    Raises: CompositionError, if the method does not exist or is a generator or
        coroutine, or if ``module`` is in a sharded model but is no unit itself.

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
    # ``functools.partial`` has ``func``: the method is registered already.
    if name == "forward" or getattr(method, "func", None) is call_method:
        return
    # The body of a generator or a coroutine runs after the call has returned, so after
    # the unit was resharded.
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise CompositionError(
            f"{type(module).__name__}.{name} is a generator or a coroutine: its body "
            "would run after the unit is sharded again. Register the method that "
            "computes one result, and call that from it."
        )
    hooked = functools.partial(call_method, state, module, method)
    # On the instance, so that other modules of the class keep the plain method.
    setattr(module, name, functools.update_wrapper(hooked, method))


register_fsdp_forward_method = register_forward_method
"""The name of this function in torch."""


def _require_plain(module: nn.Module, name: str) -> None:
    """Refuse a module that is part of a sharded model without being a unit.

    Raises: CompositionError.
    """
    if _get_module_fsdp_state(module) is not None or _get_fsdp_states(module):
        raise no_unit(module, f"register_forward_method({name!r})", recurse=False)
