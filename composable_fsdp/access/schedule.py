"""When units are gathered and freed, set by the caller for modules of a sharded model.

These change the order of all-gathers and how long memory is used, never a result. All
ranks must make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from composable_fsdp.access.settings import require_flag, units_of
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import inside_wrappers, no_unit, require_module


def set_modules_to_forward_prefetch(
    module: nn.Module, modules: Sequence[nn.Module]
) -> None:
    """Gather the units of ``modules`` when the forward of ``module`` begins.

    They are gathered in the order given, so name the nearest first. Each is full from
    then until after its own forward. An empty list restores the default:
    ``forward_prefetch``.

    Collective: none now; the all-gathers of those units come earlier.
    Raises: CompositionError, if one of them is not a fully sharded module.

    >>> for this, ahead in zip(blocks, blocks[1:]):
    ...     set_modules_to_forward_prefetch(this, [ahead])
    """
    what = "set_modules_to_forward_prefetch"
    state = state_of_unit(module, what)
    state.ahead_in_forward = _own_states(modules, what)
    state.prefetches_forward = (
        bool(state.ahead_in_forward) or state.options.forward_prefetch
    )


def set_modules_to_backward_prefetch(
    module: nn.Module, modules: Sequence[nn.Module]
) -> None:
    """Gather the units of ``modules`` when the backward of ``module`` begins.

    In the order given, so name the nearest first, which is the one used last before
    ``module`` in forward. An empty list restores the default: ``backward_prefetch``.

    Collective: none now; the all-gathers of those units come earlier.
    Raises: CompositionError, if one of them is not a fully sharded module.
    """
    what = "set_modules_to_backward_prefetch"
    state = state_of_unit(module, what)
    state.ahead_in_backward = _own_states(modules, what)


def set_reshard_after_forward(
    module: nn.Module, reshard_after_forward: bool, *, recurse: bool = True
) -> None:
    """Choose whether units free their full parameters between forward and backward.

    For all units in ``module``, or without ``recurse`` for ``module`` itself. Without a
    choice the strategy decides, and the root keeps its parameters.

    Collective: none; a unit that frees them is gathered again in backward.
    Raises: CompositionError, if there is no such unit; TypeError, if the choice is
    neither True nor False.
    """
    require_flag("set_reshard_after_forward", reshard_after_forward)
    for state in units_of(module, "set_reshard_after_forward", recurse=recurse):
        state.reshard_after_forward = reshard_after_forward


def set_reshard_after_backward(
    module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True
) -> None:
    """Choose whether units free their full parameters after backward (the default).

    Kept, they need no all-gather in the next forward: for gradient accumulation. Choose
    True again before the backward after which an optimizer steps; a forward with kept
    parameters whose shards have changed raises PhaseError.

    Collective: none.
    Raises: CompositionError, as ``set_reshard_after_forward``.
    """
    require_flag("set_reshard_after_backward", reshard_after_backward)
    for state in units_of(module, "set_reshard_after_backward", recurse=recurse):
        state.reshard_after_backward = reshard_after_backward


def state_of_unit(module: nn.Module, what: str) -> _FSDPState:
    """The state of the unit that ``module`` itself is; ``what`` was called on it."""
    require_module(module, what)
    inner = inside_wrappers(module)
    state = _get_module_fsdp_state(inner)
    if state is None or all(inner is not each for each in state.modules):
        raise no_unit(module, what, recurse=False)
    return state


def _own_states(modules: Sequence[nn.Module], what: str) -> tuple[_FSDPState, ...]:
    if isinstance(modules, nn.Module):
        raise TypeError(
            f"{what} expects a list of modules, got one {type(modules).__name__}. Pass "
            "[module]; an empty list restores the default."
        )
    return tuple(state_of_unit(each, what) for each in modules)
