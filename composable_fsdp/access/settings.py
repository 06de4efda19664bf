"""Settings of the step: FSDP2's methods as functions, called alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from composable_fsdp.comm.groups import operation_log
from composable_fsdp.comm.meshes import group_like
from composable_fsdp.comm.operations import RECORDING
from composable_fsdp.comm.placements import name_of
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.planning import walk
from composable_fsdp.runtime.unshard import record_gathers
from composable_fsdp.tree.changed_settings import note_change
from composable_fsdp.tree.root import outermost
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    inside_wrappers,
    no_unit,
    require_module,
)


def set_requires_gradient_sync(
    module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Set whether backward reduces gradients; ``no_sync`` as a switch.

    With False each unit keeps an unsharded reduce buffer ``(padded_numel,)`` in the
    reduce dtype; the next backward with True reduces the sum. The call also sets
    ``set_requires_all_reduce``.

    Args:
        module: A fully sharded module, or a module that holds such modules.
        requires_gradient_sync: True (the state after ``fully_shard``) reduces.
        recurse: Set all units in ``module``. False: only the unit ``module`` itself.

    Raises: CompositionError, if there is no such unit; TypeError, if
        ``requires_gradient_sync`` is not a bool.
    """
    name, value = "set_requires_gradient_sync", requires_gradient_sync
    for state in _units_to_set(module, name, value, recurse=recurse, notes=False):
        state.settings.sync_gradients = requires_gradient_sync
        # As in FSDP2, where both are switched together.
        _set_all_reduce(state, requires_gradient_sync)


def set_requires_all_reduce(
    module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True
) -> None:
    """Set whether a reduction includes the all-reduce over the replicate group.

    With False a hybrid unit reduce-scatters and accumulates the sums,
    ``(shard_numel,)`` in the reduce dtype, and ``.grad`` is unchanged; the next
    reduction with True all-reduces the total. So does a unit whose gradients are summed
    over the ranks that divide its states (``ZERO1``). The setting has no effect without
    an all-reduce. True, the state after ``fully_shard``, all-reduces.

    Args, Raises: As ``set_requires_gradient_sync``.
    """
    name, value = "set_requires_all_reduce", requires_all_reduce
    for state in _units_to_set(module, name, value, recurse=recurse, notes=False):
        _set_all_reduce(state, requires_all_reduce)


def _set_all_reduce(state: _FSDPState, all_reduce: bool) -> None:
    """Set whether a reduction includes the all-reduce over the replicate group."""
    rule = state.handle.rule
    # Accumulation calls before each backward; without replicas nothing changes.
    if rule.all_reduce != all_reduce and state.handle.groups.sum_ref is not None:
        note_change([state])
    rule.all_reduce = all_reduce


def set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """Set for the whole tree whether the next backward is the last of the step.

    With False the end of backward does not wait for the last reduction: the ``.grad``
    of this reduction appears in the next backward, which must follow before gradients
    are read.

    Raises: As ``set_requires_gradient_sync``.
    """
    name, value = "set_is_last_backward", is_last_backward
    for state in _units_to_set(module, name, value, recurse=True, notes=False):
        # The end of backward is an event of the tree.
        outermost(state).settings.is_last_backward = is_last_backward


def set_gradient_divide_factor(module: nn.Module, factor: float) -> None:
    """Divide sums of gradients over ranks by ``factor`` instead of the number of ranks.

    The number of ranks is that of the unit, and of experts that of all data ranks: the
    ranks of the unit times those that hold other experts.

    As in FSDP2, the call sets the module's own unit only: call the function on each
    unit that needs a factor. A communication hook divides by itself.

    Raises: CompositionError, if ``module`` is no fully sharded module; ValueError, if
        ``factor`` is not positive.
    """
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise ValueError(
            "set_gradient_divide_factor expects a positive number, got "
            f"{factor!r}. Sums over ranks are divided by it; the number of ranks is "
            "what it is without the call."
        )
    for state in _units_to_set(module, "set_gradient_divide_factor", recurse=False):
        state.handle.rule.factor = float(factor)
        # The division per region (before or after the sum) is derived from the factor.
        set_divisions(state.handle)


def set_force_sum_reduction(module: nn.Module, enable: bool) -> None:
    """Set whether the collectives of the unit ``module`` only sum, and never average.

    Raises: CompositionError, if ``module`` is no unit; TypeError, for another
        ``enable``.
    """
    name = "set_force_sum_reduction_for_comms"
    for state in _units_to_set(module, name, enable, recurse=False):
        state.handle.rule.force_sum = enable
        # The division depends on whether the backend averages.
        set_divisions(state.handle)


def set_all_reduce_hook(
    module: nn.Module,
    hook: Callable[[Tensor], None],
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Call ``hook`` with the reduced gradients of the unit ``module``; as in FSDP2.

    The hook changes one tensor ``(shard_numel,)`` per region and reduction in place:
    the sums in the reduce dtype, before the division (NCCL has divided already). It
    runs on the stream of the reduction; FSDP2's argument ``stream`` changes nothing.

    Raises: CompositionError, if ``module`` is no unit; TypeError, for another ``hook``.
    """
    if not callable(hook):
        raise TypeError(
            "set_all_reduce_hook expects a function of a tensor, got "
            f"{type(hook).__name__}."
        )
    for state in units_of(module, "set_all_reduce_hook", recurse=False):
        note_change([state])
        state.handle.rule.after_sum = hook


def set_separate_reduce_scatter_group(
    module: nn.Module, enable: bool = True, *, recurse: bool = True
) -> None:
    """Reduce gradients over process groups of their own; as in FSDP2.

    An all-gather then need not wait for the reduce-scatter before it. A second
    communicator takes device memory. False goes back to one group.

    Collective: at the first call creates a group per set of ranks that share
        parameters; all of these ranks must call in the same order. NCCL with
        ``init_process_group(device_id=...)``: all ranks of the default group.
    Args, Raises: As ``set_requires_gradient_sync``.
    """
    name = "set_separate_reduce_scatter_group"
    for state in _units_to_set(module, name, enable, recurse=recurse):
        ref, rule = state.handle.groups.scatter_ref, state.handle.rule
        rule.group = None
        # A unit of a single rank sends nothing.
        if enable and ref is not None:
            group = group_like(ref.get(), "reductions")
            # The first forward records the groups of the units alone.
            for watch in RECORDING:
                watch([group], agree=True)
            rule.group = operation_log(group)


def set_reduce_scatter_unused_params(
    module: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Set whether parameters without a gradient on this rank are reduced with zeros.

    For models whose ranks use different parameters (experts, modalities). With True
    every trainable parameter gets the average as ``.grad`` on every rank; a unit that
    ran in forward and got no gradient on this rank is all-gathered and reduced in its
    turn. With False (the default) ``.grad`` stays None for a parameter without a
    gradient, and the ranks must agree on the unused parameters. All ranks must run the
    same kind of backward. The setting takes effect in the next forward.

    Args, Raises: As ``set_requires_gradient_sync``.
    """
    name, value = "set_reduce_scatter_unused_params", reduce_scatter_unused_params
    for state in _units_to_set(module, name, value, recurse=recurse):
        state.handle.rule.fill = value


def register_comm_hook(
    module: nn.Module, state: object, hook: Callable[..., object]
) -> None:
    """Reduce gradients by ``hook`` instead of the collectives; the contract is FSDP1's.

    The hook is called once per region and reduction: ``hook(state, gradient, output)``
    if the parameters are sharded, ``hook(state, gradient)`` if every rank holds the
    full parameters, on the stream of the reduction. ``gradient`` ``(padded_numel,)``
    may be overwritten, and what ``output`` ``(shard_numel,)`` holds becomes the
    gradient. ``features`` has hooks; torch's work as well.

    Args:
        module: A fully sharded module, or a module that holds such modules.
        state: The first argument of ``hook``.
        hook: The function that reduces.

    Collective: none; in backward the collectives of ``hook``.
    Raises: CompositionError, if shards of gradients are summed over further ranks, or
        if a unit has a hook already; TypeError, if ``hook`` is not callable. No hook is
        registered then.
    """
    if not callable(hook):
        raise TypeError(
            "register_comm_hook expects a function hook(state, gradient[, output]), "
            f"got {type(hook).__name__}."
        )
    units = units_of(module, "register_comm_hook", recurse=True)
    # Check all units before the first unit changes.
    for unit in units:
        plan = unit.handle.layout.plan
        if plan.shard_world_size > 1 and plan.sum_ranks > 1:
            raise CompositionError(
                f"register_comm_hook was called with unit {unit.name} of strategy "
                f"{name_of(unit.options.chosen)}: a hook reduces over one group to "
                "this rank's part. Use FULL_SHARD, SHARD_GRAD_OP, ZERO2 or NO_SHARD."
            )
        if unit.handle.rule.hook is not None:
            raise CompositionError(
                f"register_comm_hook was called twice for unit {unit.name}; a unit "
                "takes one hook. Register one that does both."
            )
    note_change(units)
    for unit in units:
        unit.handle.rule.hook, unit.handle.rule.hook_state = hook, state
        set_divisions(unit.handle)


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
    state, ahead = _ahead(module, modules, "set_modules_to_forward_prefetch")
    state.ahead_in_forward = ahead
    # A separate flag, so that forward tests a single attribute.
    state.settings.prefetches_forward = (
        bool(state.ahead_in_forward) or state.options.forward_prefetch
    )


def set_modules_to_backward_prefetch(
    module: nn.Module, modules: Sequence[nn.Module]
) -> None:
    """All-gather the units of ``modules`` when the backward of ``module`` begins.

    The module that forward used last comes first. An empty list restores the default.

    Args, Raises: As ``set_modules_to_forward_prefetch``.
    """
    state, ahead = _ahead(module, modules, "set_modules_to_backward_prefetch")
    # An empty tuple selects the default.
    state.ahead_in_backward = ahead


def set_reshard_after_forward(
    module: nn.Module, reshard_after_forward: bool, *, recurse: bool = True
) -> None:
    """Set whether units free their full parameters between forward and backward.

    True frees, and backward all-gathers again. Before the first call the strategy
    decides, and the root keeps its full parameters.

    Args, Raises: As ``set_requires_gradient_sync``.
    """
    name, value = "set_reshard_after_forward", reshard_after_forward
    for state in _units_to_set(module, name, value, recurse=recurse):
        state.settings.reshard_after_forward = value


def set_reshard_after_backward(
    module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True
) -> None:
    """Set whether units free their full parameters after backward (the default).

    A unit that keeps full parameters needs no all-gather in the next forward, which
    serves gradient accumulation. Set True again before the backward that precedes an
    optimizer step: a forward with kept full parameters whose shards have changed raises
    PhaseError.

    Args, Raises: As ``set_requires_gradient_sync``.
    """
    name, value = "set_reshard_after_backward", reshard_after_backward
    for state in _units_to_set(module, name, value, recurse=recurse):
        set_reshard(state, value)


def _units_to_set(
    module: nn.Module,
    name: str,
    value: object = True,
    *,
    recurse: bool,
    notes: bool = True,
) -> list[_FSDPState]:
    """Return ``units_of``, whose flag function ``name`` sets. Raises: TypeError."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} expects True or False, got {value!r}. Compare, if it is a number "
            "or a text: (step + 1) % 4 == 0."
        )
    found = units_of(module, name, recurse=recurse)
    if notes:
        note_change(found)
    return found


def units_of(module: nn.Module, name: str, *, recurse: bool) -> list[_FSDPState]:
    """Return the units in ``module``. Raises: CompositionError; TypeError."""
    if not recurse:
        return [state_of_unit(module, name)]
    require_module(module, name)
    states = _get_fsdp_states(module)
    if not states:
        raise no_unit(module, name, recurse=True)
    return states


def units_with_parts(module: nn.Module, what: str) -> list[_FSDPState]:
    """Return the units that hold parts of ``module``. Raises: CompositionError."""
    require_module(module, what)
    inside = {id(each): each for each in walk.modules(module)}
    found: dict[int, _FSDPState] = {}
    for each in inside.values():
        state = _get_module_fsdp_state(each)
        if state is not None and not any(id(m) in inside for m in state.modules):
            owners = state.handle.layout.owners
            if id(state) not in found and any(id(m) in inside for m in owners):
                found[id(state)] = state
    if not found:
        return units_of(module, what, recurse=True)
    return [*found.values(), *_get_fsdp_states(module)]


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


def _ahead(
    module: nn.Module, modules: Sequence[nn.Module], what: str
) -> tuple[_FSDPState, tuple[_FSDPState, ...]]:
    """Return the unit, whose setting changes now, and the units ``modules``."""
    state = state_of_unit(module, what)
    ahead = tuple(state_of_unit(each, what) for each in modules)
    note_change([state])
    return state, ahead
