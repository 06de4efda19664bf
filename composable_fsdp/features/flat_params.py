"""``flat_parameters``: parameters that an optimizer steps with the fewest kernels.

Value and gradient of the padding are zero; no norm and no state dict includes it.
"""

from __future__ import annotations

import functools
from operator import attrgetter

from torch import nn

from composable_fsdp.access.other_parts import refuse_forms
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import flat_of
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import quoted, strip_wrapper
from composable_fsdp.optim.step_hooks import install_step_hooks
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.tree import moments
from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_states,
    no_unit,
    require_module,
)

_WHAT = "flat_parameters"


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a parameter per trainable region, for an optimizer to step on.

    Each flat parameter has shape ``(shard_numel,)``. Its data is the region's shard,
    which the original parameters view; backward makes the flat gradient its ``.grad``.
    The order is equal on all ranks; trainable parameters that no unit holds come last,
    unchanged. Every call returns the same objects.

    After the call ``.grad`` of the originals is None; existing gradients move to the
    flat parameters. If a parameter gets no gradient while others of its region do, its
    gradient is zero: an element-wise optimizer then still applies weight decay and
    momentum. An optimizer over the originals of a flat parameter, and an optimizer that
    is not element-wise, are refused at their next step.

    Clear gradients with ``optimizer.zero_grad()``, or with ``zero_grad()`` of
    ``module`` or of a unit. ``zero_grad()`` of a module around ``module`` does not
    clear flat gradients.

    Collective: none; all ranks should call alike.
    Raises: CompositionError, if ``module`` holds no unit, or holds parameters of a unit
    that is not in ``module``; PlanError, under tensor parallelism; PhaseError, inside
    forward, backward or ``unshard_params``.

    >>> optim = AdamW(flat_parameters(model), foreach=True)
    """
    require_module(module, _WHAT)
    states = _get_fsdp_states(module)
    if not states:
        raise no_unit(module, _WHAT, recurse=True)
    handles = {state.handle for state in states}
    others = []
    for name, parameter in module.named_parameters():
        found = find_leaf(parameter)
        if found is None:
            # No unit holds this parameter, so there is no flat parameter for it.
            others.append(parameter)
        elif found[0] not in handles:
            raise CompositionError(
                f"{_WHAT} was called on a {type(module).__name__} that holds parameter "
                f"{quoted(strip_wrapper(name))} of fully sharded module "
                f"{found[0].name}, and not that module: a flat parameter is of all of "
                "a unit. Pass the fully sharded module, or the whole model."
            )
    # Their state is one interval of a region, and of rectangles none of a whole.
    refuse_forms(_get_fsdp_handles(module), _WHAT)
    for state in states:
        require_between_steps(state, _WHAT)
        # Regions are either trainable or frozen: lay the unit out anew first, if the
        # user has changed ``requires_grad`` since.
        moments.changes.follow_flags(state)
    flats = [
        flat_of(handle, region)
        for handle in _get_fsdp_handles(module)
        for region in handle.layout.trainable
    ]
    # Optimizers that were checked before may hold the originals, so check them again.
    install_step_hooks()
    # Users call ``zero_grad`` on the model or on a unit's module.
    for each in (module, *(m for state in states for m in state.modules)):
        _clear_flat_ones_too(each)
    return [*flats, *filter(attrgetter("requires_grad"), others)]


def _clear_flat_ones_too(module: nn.Module) -> None:
    """Replace ``module.zero_grad`` so that flat gradients are cleared, too."""
    # ``nn.Module.zero_grad`` clears the parameters of the module, and flat parameters
    # are not registered in any module.
    if getattr(module.zero_grad, "func", None) is not _zero_grad:
        own = functools.partial(_zero_grad, module)
        vars(module)["zero_grad"] = functools.update_wrapper(own, module.zero_grad)


def _zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """Clear the gradients of ``module`` and the flat gradients of the units inside."""
    type(module).zero_grad(module, set_to_none)
    for handle in _get_fsdp_handles(module):
        for flat in handle.writes.flat_parameters:
            flat.grad = None if set_to_none or flat.grad is None else flat.grad.zero_()
