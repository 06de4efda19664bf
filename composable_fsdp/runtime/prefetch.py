"""Issuing an all-gather before it is needed: one unit ahead, or those that were listed.

Which unit comes next is read from a record, never searched in the tree: in backward
from the order of the forward, in forward from the order of the last round of its mode.
All ranks have equal records, so all issue alike. What turns out unused is resharded
where the round ends.

On CUDA a unit gathered ahead takes the place of one that was resharded and not freed
(``unshard``): its all-gather waits for that one's last reader, so it runs beside the
unit in use.
"""

from __future__ import annotations

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import reshard, unshard, wait_for_freed_memory
from composable_fsdp.tree.state import ForwardRecord, RuntimeContext, _FSDPState


def unshard_in_backward(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Unshard a unit whose backward begins and that nobody gathered ahead.

    Without prefetch the reduction in flight is finished first, so that its buffer is
    free while gradients arrive. The network serves in order: a unit that waits for its
    parameters has waited for the reduction before them.

    Collective: the unit's all-gather; in a hybrid mesh on CPU before it the all-reduce
    of the reduction.
    """
    if handle.plan.options.backward_prefetch is None and context.reducing is not None:
        finish_reduction(context)
    unshard(context, handle)


def prefetch_backward(
    context: RuntimeContext, tape: ForwardRecord, reached: int
) -> None:
    """Unshard the unit whose backward comes next: the one used before ``reached``.

    That is the earliest use that backward has come to. None if that unit is full
    already.

    Collective: that unit's all-gather, or none.
    """
    handle: FlatParamHandle | None = tape.order.before(reached)
    if handle is not None and (not handle.gathered or handle.retiring):
        unshard(context, handle)


def prefetch_forward(context: RuntimeContext, state: _FSDPState) -> None:
    """Unshard the unit that ran after this use last time, or the units listed.

    Collective: one all-gather per unit that is not full.
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
    """Unshard the units that the caller listed for ``state``, in the list's order.

    Collective: one all-gather per unit that is not full.
    Raises: CompositionError, if a unit belongs to another tree.
    """
    for target in listed:
        if target.context is not context:
            raise CompositionError(
                f"Unit {state.name} is to prefetch {target.name}, which is not below "
                "the same outermost fully sharded module. List units of one tree."
            )
        _gather_ahead(context, target.handle)


def _gather_ahead(context: RuntimeContext, handle: FlatParamHandle) -> None:
    if handle.needs_gather and (not handle.gathered or handle.retiring):
        if context.retiring:
            wait_for_freed_memory(context, handle)
        unshard(context, handle)
        context.prefetched.append(handle)


def drop_unused(context: RuntimeContext) -> None:
    """Reshard units that were gathered ahead in this round and not used. Sends nothing.

    Waits for their collectives.
    """
    for handle in context.prefetched:
        if handle.ready is not None and handle.full_since is None:
            reshard(context, handle)
    context.prefetched.clear()
