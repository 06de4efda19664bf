"""Registration of the hooks of ``forward`` and ``grad_hooks`` on a unit."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame

from composable_fsdp.runtime.backward import FSDP_HOOK_KEY
from composable_fsdp.runtime.forward import post_forward, pre_forward
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.tree.state import _FSDPState

# torch.compile neither traces a forward hook nor what it calls, so a compiled block
# stays a single graph. The effect of ``torch.compiler.disable`` without its wrapper,
# which took a dozen calls per hook and imported dynamo (checked on torch 2.13).
for _hook in (pre_forward, post_forward):
    _skip = eval_frame._FrameAction.SKIP
    _whole = eval_frame._FrameExecStrategy(_skip, _skip)
    eval_frame.set_code_exec_strategy(_hook.__code__, _whole)
    vars(_hook)["_torchdynamo_disable"] = True


def install_hooks(state: _FSDPState) -> None:
    """Register the forward hooks of the unit's modules and the hooks for gradients."""
    before, after = MethodType(pre_forward, state), MethodType(post_forward, state)
    # The effect of ``register_forward_pre_hook(prepend=True, with_kwargs=True)`` and
    # ``register_forward_hook(always_call=True)``, without their handles, which took
    # most of the time and have no use here (checked on torch 2.13 and 2.11).
    for module in state.modules:
        pre_hooks: Any = module._forward_pre_hooks
        pre_hooks[FSDP_HOOK_KEY] = before
        # Move the hook to the front: pre-hooks of the user see full parameters.
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
    """Call ``method`` as if it were the forward of the unit's ``module``."""
    try:
        changed = pre_forward(state, module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = method(*args, **kwargs)
    except BaseException:
        # Inside ``except``, so that ``post_forward`` finds the exception in
        # ``sys.exc_info``.
        post_forward(state, module, args, None)
        raise
    replaced = post_forward(state, module, args, output)
    return output if replaced is None else replaced
