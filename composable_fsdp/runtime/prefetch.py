"""Prefetching: all-gathers that are issued before the unit is needed.

The next unit is read from a record and never searched in the module tree: in backward
from the order of the forward, in forward from the order of the last forward of the same
mode. All ranks have equal records, so all ranks issue the same all-gathers. A user may
list the units to prefetch instead.
"""

from __future__ import annotations

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.residency import NOT_GATHERED
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import reshard, unshard, wait_for_freed_memory
from composable_fsdp.tree.state import ForwardRecord, RuntimeContext, _FSDPState


def unshard_in_backward(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Unshard a unit whose backward begins and that was not prefetched.

    Collective: the all-gather of the unit. Without ``backward_prefetch``, and if
        parameters are both sharded and replicated on CPU, the all-reduce of the
        reduction in flight precedes the all-gather.
    """
    # Without prefetch, finish the reduction in flight first, so that the reduce buffer
    # is free while gradients arrive. This wait costs nothing: a backend runs
    # collectives in order, so the all-gather runs after the reduction in any case.
    if handle.plan.options.backward_prefetch is None and context.reducing is not None:
        finish_reduction(context)
    unshard(context, handle)


def prefetch_backward(
    context: RuntimeContext, tape: ForwardRecord, reached: int
) -> None:
    """Unshard the unit whose backward comes next.

    Args:
        context: the context of the tree.
        tape: the record of the forward.
        reached: index in ``tape.order`` of the earliest use that backward has reached.
            The nearest earlier use of another unit is prefetched.

    Collective: the all-gather of that unit; none if no unit is earlier, or that unit is
        unsharded already.
    """
    handle: FlatParamHandle | None = tape.order.before(reached)
    if handle is not None and handle.residency in NOT_GATHERED:
        unshard(context, handle)


def prefetch_forward(context: RuntimeContext, state: _FSDPState) -> None:
    """Unshard the unit that followed this use in the last forward, or the listed units.

    Collective: one all-gather per unit that is not unsharded.
    """
    if state.ahead_in_forward:
        prefetch_listed(context, state, state.ahead_in_forward)
        return
    log = state.handle.forward_log
    following = log.expected[log.position] if log is not None else None
    if isinstance(following, FlatParamHandle):
        _gather_ahead(context, following)


def prefetch_listed(
    context: RuntimeContext, state: _FSDPState, listed: tuple[_FSDPState, ...]
) -> None:
    """Unshard the units that the user listed for ``state``, in the order of the list.

    Args:
        context: the context of the tree.
        state: the unit that runs.
        listed: the units to prefetch; all must belong to the tree of ``context``.

    Raises: CompositionError, if a listed unit belongs to another tree.
    Collective: one all-gather per unit that is not unsharded.
    """
    for target in listed:
        if target.context is not context:
            raise CompositionError(
                f"Unit {state.name} is to prefetch {target.name}, which is not below "
                "the same outermost fully sharded module. List units of one tree."
            )
        _gather_ahead(context, target.handle)


def _gather_ahead(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Unshard the unit if needed, and remember the unit until the forward ends."""
    if handle.form.needs_gather and handle.residency in NOT_GATHERED:
        # On CUDA the prefetched unit takes the place of a resharded unit whose memory
        # is not freed: the all-gather waits for the last reader of that unit and
        # overlaps the compute of the unit in use.
        if context.retiring:
            wait_for_freed_memory(context, handle)
        unshard(context, handle)
        context.prefetched.append(handle)


def drop_unused(context: RuntimeContext) -> None:
    """Reshard units that were prefetched in this forward and not used.

    Waits for the all-gathers of these units. Collective: none.
    """
    for handle in context.prefetched:
        if handle.ready is not None and not handle.kept_full:
            reshard(context, handle)
    context.prefetched.clear()
