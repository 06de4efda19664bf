"""Set when the units of a sharded model are all-gathered and freed.

The settings change the order of all-gathers and the lifetime of memory, never a result.
All ranks must make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from composable_fsdp.access.settings import changed_units, require_flag
from composable_fsdp.runtime.unshard import record_gathers
from composable_fsdp.tree.changed_settings import note_change
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import inside_wrappers, no_unit, require_module


def set_modules_to_forward_prefetch(
    module: nn.Module, modules: Sequence[nn.Module]
) -> None:
    """All-gather the units of ``modules`` when the forward of ``module`` begins.

    Each unit of ``modules`` is unsharded from then until after its own forward.

    Args:
        module: The fully sharded module whose forward starts the all-gathers.
        modules: Fully sharded modules in the order of the all-gathers: put the module
            that runs first at the front. An empty list restores the default,
            ``forward_prefetch``.

    Collective: none now; the all-gathers of these units come earlier.
    Raises: CompositionError, if a module is no fully sharded module.

    >>> for this, ahead in zip(blocks, blocks[1:]):
    ...     set_modules_to_forward_prefetch(this, [ahead])
    """
    what = "set_modules_to_forward_prefetch"
    state = state_of_unit(module, what)
    ahead = _own_states(modules, what)
    note_change([state])
    state.ahead_in_forward = ahead
    # A separate flag, so that forward tests a single attribute.
    state.settings.prefetches_forward = (
        bool(state.ahead_in_forward) or state.options.forward_prefetch
    )


def set_modules_to_backward_prefetch(
    module: nn.Module, modules: Sequence[nn.Module]
) -> None:
    """All-gather the units of ``modules`` when the backward of ``module`` begins.

    Args:
        module: The fully sharded module whose backward starts the all-gathers.
        modules: Fully sharded modules in the order of the all-gathers: put the module
            at the front that forward used last before ``module``. An empty list
            restores the default, ``backward_prefetch``.

    Collective: none now; the all-gathers of these units come earlier.
    Raises: CompositionError, if a module is no fully sharded module.
    """
    what = "set_modules_to_backward_prefetch"
    state = state_of_unit(module, what)
    ahead = _own_states(modules, what)
    note_change([state])
    # An empty tuple selects the default.
    state.ahead_in_backward = ahead


def set_reshard_after_forward(
    module: nn.Module, reshard_after_forward: bool, *, recurse: bool = True
) -> None:
    """Set whether units free their full parameters between forward and backward.

    Args:
        module, recurse: As for ``set_requires_gradient_sync``.
        reshard_after_forward: True frees, and backward all-gathers again. Before the
            first call the strategy decides, and the root keeps its full parameters.

    Raises: As ``set_requires_gradient_sync``.
    """
    require_flag("set_reshard_after_forward", reshard_after_forward)
    for state in changed_units(module, "set_reshard_after_forward", recurse=recurse):
        state.settings.reshard_after_forward = reshard_after_forward


def set_reshard_after_backward(
    module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True
) -> None:
    """Set whether units free their full parameters after backward (the default).

    A unit that keeps full parameters needs no all-gather in the next forward, which
    serves gradient accumulation. Set True again before the backward that precedes an
    optimizer step: a forward with kept full parameters whose shards have changed raises
    PhaseError.

    Args:
        module, recurse: As for ``set_requires_gradient_sync``.
        reshard_after_backward: True frees.

    Raises: As ``set_requires_gradient_sync``.
    """
    require_flag("set_reshard_after_backward", reshard_after_backward)
    for state in changed_units(module, "set_reshard_after_backward", recurse=recurse):
        set_reshard(state, reshard_after_backward)


def set_reshard(state: _FSDPState, reshard_after_backward: bool) -> None:
    """Set whether a unit frees its full parameters after backward."""
    state.settings.reshard_after_backward = reshard_after_backward
    if not reshard_after_backward:
        record_gathers(state.handle)


def state_of_unit(module: nn.Module, what: str) -> _FSDPState:
    """Return the state of the unit ``module``. Raises: CompositionError, for others."""
    require_module(module, what)
    inner = inside_wrappers(module)
    state = _get_module_fsdp_state(inner)
    # Submodules of the unit have the state, too.
    if state is None or all(inner is not each for each in state.modules):
        raise no_unit(module, what, recurse=False)
    return state


def _own_states(modules: Sequence[nn.Module], what: str) -> tuple[_FSDPState, ...]:
    """Return the states of the units ``modules``. Raises: as ``state_of_unit``."""
    # An nn.Sequential would pass for a list of its children.
    if isinstance(modules, nn.Module):
        raise TypeError(
            f"{what} expects a list of modules, got one {type(modules).__name__}. Pass "
            "[module]; an empty list restores the default."
        )
    return tuple(state_of_unit(each, what) for each in modules)
