"""Attaching the functions of ``forward`` and ``backward`` to modules and leaves, once.

Forward hooks are taken out of torch.compile's sight as a whole, so that a compiled
block stays one graph (``torch._disable_dynamo`` is lazy: unlike
``torch.compiler.disable`` it does not import dynamo; checked on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from composable_fsdp.runtime.forward import post_forward, pre_forward
from composable_fsdp.runtime.grad_hooks import FSDP_HOOK_KEY, install_grad_hooks
from composable_fsdp.tree.state import _FSDPState

_disable_dynamo: Any = vars(torch)["_disable_dynamo"]
_pre_forward = _disable_dynamo(pre_forward)
_post_forward = _disable_dynamo(post_forward)
# Pickled by name, so that who pickles a module gets as far as the state, which says
# what to do instead.
for _name, _hook in (("_pre_forward", _pre_forward), ("_post_forward", _post_forward)):
    _hook.__module__, _hook.__qualname__ = __name__, _name


def install_hooks(state: _FSDPState) -> None:
    """Arm the unit: hooks on its modules' forward and on its full leaves' gradients.

    A module gets what ``register_forward_pre_hook(prepend=True, with_kwargs=True)`` and
    ``register_forward_hook(always_call=True)`` set, less their handles, which took
    longer than all else and which nobody kept (checked on torch 2.13 and 2.11).
    """
    before, after = MethodType(_pre_forward, state), MethodType(_post_forward, state)
    for module in state.modules:
        pre_hooks: Any = module._forward_pre_hooks
        pre_hooks[FSDP_HOOK_KEY] = before
        # Ours comes first: pre-hooks of the user see full parameters.
        pre_hooks.move_to_end(FSDP_HOOK_KEY, last=False)
        module._forward_pre_hooks_with_kwargs[FSDP_HOOK_KEY] = True
        module._forward_hooks[FSDP_HOOK_KEY] = after
        module._forward_hooks_always_called[FSDP_HOOK_KEY] = True
    install_grad_hooks(state)


def call_method(
    state: _FSDPState,
    module: nn.Module,
    method: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``method`` as if it were the forward of the unit's ``module``.

    Collective: as a forward's.
    """
    changed = _pre_forward(state, module, args, kwargs)
    if changed is not None:
        args, kwargs = changed
    try:
        output = method(*args, **kwargs)
    except BaseException:
        # Called while the exception is handled, it knows that there is no output.
        _post_forward(state, module, args, None)
        raise
    replaced = _post_forward(state, module, args, output)
    return output if replaced is None else replaced
