"""Begin an iteration, and reset a tree after a forward or backward that raised.

A backward that raises runs no hook of ours: the next entry finds graph tasks that have
not ended and resets their units, without waiting for ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from itertools import chain
from types import FrameType

import torch
from torch import Tensor, nn

from composable_fsdp.comm.operations import end_all_ranges
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import residency
from composable_fsdp.flat.gradients import free_cleared
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import (
    COPIES_SHOWN,
    SHARDED,
    UNSHARDED,
    shards_are_unchanged,
)
from composable_fsdp.naming import TRANSPARENT, join_name
from composable_fsdp.planning.walk import named
from composable_fsdp.runtime import graph_task, offload, reduce, unshard
from composable_fsdp.runtime.grad_hooks import make_nodes_on_current_stream
from composable_fsdp.tree import moments
from composable_fsdp.tree.changed_settings import changed_flags, changed_settings
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import (
    ALL_RANKS,
    OWNERS,
    RuntimeContext,
    StepOrder,
    _FSDPState,
    _RootFSDPState,
    is_below,
    root_of,
)


class GradientOrder(StepOrder):
    """The default: a unit reduces as soon as its gradients are complete."""

    __slots__ = ()

    reduce = staticmethod(reduce.reduce_gradients)
    prefetch = staticmethod(unshard.prefetch_backward)

    def recomputed(self: StepOrder) -> StepOrder:
        """Return an order of its own: its backward may be another graph task."""
        return GradientOrder()


def begin_iteration(context: RuntimeContext, state: _FSDPState) -> None:
    """Begin a forward at ``state``, the outermost unit of this call.

    Raises: PlanError, PhaseError, for changes of parameters that cannot be taken up.
    Collective: in the first forwards as ``RANKS_MEET``; else as ``finish_reduction``.
    """
    require_outside_block(context, state)
    # Outside backward a graph task that has not ended belongs to a backward that
    # raised.
    if context.tasks:
        graph_task.require_no_other_backward(context)
        recover(context, drop_gradients=True)
    elif context.entered is not None:
        recover(context, drop_gradients=False)
    if context.frame is not None:
        graph_task.require_not_elsewhere(context)
    context.frame = _module_call()
    for observer in context.observers:
        observer.iteration_begins()
    for log in context.forward_logs:
        log.drop()
    context.prefetched.clear()
    _discard_old_full_params(context)
    root = root_of(context)
    _follow_changes(context, root)
    if root.initial.compared != ALL_RANKS or not context.is_checked:
        _begin_first(context, root)
    for call in tuple(moments.NEXT_FORWARD):
        call(context)
    for unit in context.lists:
        unit.remaining = frozenset()
    for unit in context.precisions:
        cast_buffers(unit)
    # The order log keeps a separate order of uses for each mode. With the frozen
    # parameters: a rank that froze others than the rest would reduce buffers of other
    # sizes, which aborts the process.
    mode = (
        state.fqn,
        state.module.training,
        torch.is_grad_enabled(),
        context.changed_flags,
    )
    fills = True in [handle.rule.fill for handle in context.handles]
    context.order = moments.ORDERS[fills](mode)
    streams = context.streams
    if not streams.host_waits and streams.begin_iteration():
        make_nodes_on_current_stream(context)
    context.entered = state


def require_outside_block(context: RuntimeContext, state: _FSDPState) -> None:
    """Raise PhaseError inside ``unshard_params``."""
    if context.summoned is not None:
        raise context.summoned.refusal(
            f"Forward of fully sharded module {state.name} was called"
        )


def _discard_old_full_params(context: RuntimeContext) -> None:
    """Reshard the units that an earlier forward or a user left full."""
    for handle in context.handles:
        # Free ``gradient.shard`` if ``zero_grad`` has cleared ``.grad``.
        free_cleared(handle)
        if handle.residency is UNSHARDED:  # by hand
            residency.refuse_foreign(handle)
            _keep_or_discard(context, handle)
        elif handle.residency is not SHARDED or handle.kept_for_forward:
            _keep_or_discard(context, handle)


def _follow_changes(context: RuntimeContext, root: _RootFSDPState) -> None:
    """Adopt parameters that a user has changed, frozen or unfrozen between steps."""
    froze = False
    for unit in root._root_states:
        handle = unit.handle
        if not handle.kept_for_forward and not shards_are_unchanged(handle):
            moments.changes.adopt(unit)
            # A forward without a graph keeps the regions, because a graph of an earlier
            # forward may hold them: with adapters, the reference forward of DPO comes
            # between a forward and its backward, and freezes them.
            if torch.is_grad_enabled():
                froze |= moments.changes.follow_flags(unit)
    if froze or (moments.CHANGED and context in moments.CHANGED):
        # Once after all units, because the flags of every unit are read.
        flags = map(changed_flags, context.handles)
        settings = changed_settings(root._root_states)
        context.changed_flags = (*chain(*flags), *settings)
        moments.CHANGED.discard(context)


def _keep_or_discard(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Reshard a unit that is full, unless the unit was kept and is current."""
    if handle.kept_for_forward and keep_if_current(handle):
        return
    if handle.residency is not SHARDED:
        unshard.discard_full(context, handle)


def _begin_first(context: RuntimeContext, root: _RootFSDPState) -> None:
    """Call what one of the first forwards of a tree calls."""
    for meet in moments.RANKS_MEET:
        meet(context, root)
    if not context.is_checked:
        for begin in moments.FIRST_FORWARD:
            begin(context)
        context.is_checked = True


def cast_buffers(state: _FSDPState) -> None:
    """Cast the unit's floating point buffers to ``buffer_dtype``, in place."""
    precision = state.precision
    assert precision is not None
    dtype, known = precision.buffer_dtype, precision.buffer_dtypes
    # By id, because a shared buffer is cast under the first of its names.
    just_cast: dict[int, torch.dtype] = {}
    for number, fqn, buffer in own_buffers(state):
        if not buffer.is_floating_point():
            continue
        if buffer.dtype != dtype:
            just_cast[id(buffer)] = buffer.dtype
            # ``.data``: the buffer object stays the same.
            buffer.data = buffer.to(dtype)
        if just_cast and id(buffer) in just_cast:
            # Two modules of the unit may have buffers of the same name.
            known[number, fqn] = just_cast[id(buffer)]


def own_buffers(state: _FSDPState) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the unit's module, by number, the name from there, and the buffer."""

    def enter(module: nn.Module) -> bool:
        owner = OWNERS.get(module)
        # An activation checkpoint wrapper that was inserted after ``fully_shard`` has
        # no owner; the wrapped module may belong to this unit.
        return owner is state or (
            owner is None and any(name in module._modules for name in TRANSPARENT)
        )

    for number, root in enumerate(state.modules):
        for fqn, module in named(root, enter=enter, every_path=True):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield number, join_name(fqn, name), buffer


def end_iteration(context: RuntimeContext) -> None:
    """Record that the forward that began the iteration has ended or raised."""
    context.entered = context.frame = context.tail = None
    for observer in context.observers:
        observer.iteration_ends()


def keep_if_current(handle: FlatParamHandle) -> bool:
    """Return whether a full unit is current; PhaseError after a write to shards."""
    shown = handle.residency is UNSHARDED
    # ``shards_are_unchanged`` requires that the modules show the sharded parameters.
    if shown:
        residency.use_sharded(handle)
    if handle.layout.plan.stays_full and not torch.is_grad_enabled():
        # A write that no version shows may come before a forward without a graph, such
        # as averaged weights swapped in through ``.data``.
        return False
    if handle.writes.gathered_at != residency.shard_versions(handle):
        if handle.layout.plan.stays_full:
            return False
        raise PhaseError(
            f"The shards of fully sharded module {handle.name} were written to while "
            "its full parameters were kept (an optimizer step, most likely), so the "
            "next forward would use old values. Before the step call reshard(module), "
            "or composable_fsdp.access.set_reshard_after_backward(module, True) before "
            "the backward that comes before the step."
        )
    good = shards_are_unchanged(handle) and moments.changes.is_in_shards(handle)
    if shown and good:
        residency.use_full(handle)
    return good


def _module_call() -> FrameType | None:
    """Return the frame of the innermost module call, alive as long as the forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame


def is_live(context: RuntimeContext) -> bool:
    """Return whether the forward that began the iteration is still running."""
    # A KeyboardInterrupt runs no post-forward hook, so ``entered`` may be stale; only
    # the call stack tells. Without a frame (not begun by a module call) the answer is
    # unknown.
    if context.frame is None or is_below(context.frame, sys._getframe(1)):
        return True
    graph_task.require_not_elsewhere(context)
    return False


def mode_of(context: RuntimeContext, handle: FlatParamHandle) -> Hashable:
    """Return the mode of the running forward, as the ranks of a unit know the mode."""
    is_live(context)
    return context.order.mode


def recover(context: RuntimeContext, *, drop_gradients: bool) -> None:
    """Reshard every unit and reset all forwards and backwards that were running.

    Raises: RuntimeError, if a collective of this rank has failed, after the reset.
    """
    failed: RuntimeError | None = None
    end_iteration(context)
    end_all_ranges(context)
    context.tasks.clear()
    context.dead.clear()
    context.filling.clear()
    context.prefetched.clear()
    for log in (*context.forward_logs, *context.backward_logs):
        log.drop()
    if drop_gradients:
        # Drop the reduction instead of finishing: the user may have called
        # ``zero_grad`` since backward raised.
        try:
            reduce.drop_reduction(context)
        except RuntimeError as error:
            failed = error
    for handle in context.handles:
        for call in handle.calls:
            call.forget_inputs()
        handle.calls.clear()
        graph_task.reset_backward(handle)
        if drop_gradients:
            reduce.drop_unreduced_grads(context, handle)
        try:
            unshard.end_use(context, handle, reshards=True, kept=False)
        except RuntimeError as error:  # of a prefetched all-gather
            failed = failed or error
            # The wait that raised has ended the all-gather, so this one reshards.
            unshard.end_use(context, handle, reshards=True, kept=False)
    for unit in context.lists:
        unit.remaining = frozenset()
    unshard.free_oldest(context, keep=0)
    reduce.finish_reduction(context)
    offload.finish_d2h_grad_copies(context)
    if failed is not None:
        raise failed


def require_between_steps(state: _FSDPState, what: str) -> None:
    """Raise PhaseError, unless the tree of ``state`` is between steps and sharded."""
    context = state.context
    if context is None:
        moments.changes.adopt(state, values_required=False)
        return
    if context.entered is not None and not is_live(context):
        recover(context, drop_gradients=False)
    running = None
    if context.entered is not None:
        running = f"the forward of {context.entered.name}"
    elif graph_task.current_task() != NO_TASK:
        running = "backward"
    if running is not None:
        raise PhaseError(
            f"{what} was called on {state.name} inside {running}, where units are full "
            "by turns. Call it between steps, after loss.backward() has returned."
        )
    if context.summoned is not None:
        raise context.summoned.refusal(f"{what} was called on {state.name}")
    if context.tasks:
        graph_task.require_no_other_backward(context)
        recover(context, drop_gradients=True)
    # The caller may write shards on the host, which copies to the device may still
    # read.
    offload.synchronize_copy_stream(context)
    handle = state.handle
    if handle.residency is not UNSHARDED and handle.residency is not COPIES_SHOWN:
        # The unit is kept full for backward, and the user has assigned ``p.data``.
        if handle.residency is not SHARDED and not shards_are_unchanged(handle):
            before_shard_write(state)
        if handle.residency is SHARDED:
            moments.changes.adopt(state, values_required=False)


def before_shard_write(state: _FSDPState) -> None:
    """Reshard a unit that was left full, because the caller will write the shards."""
    state.handle.writes.steps += state.handle.writes.steps_per_reduction
    if state.handle.residency is not SHARDED:
        assert state.context is not None
        unshard.reshard(state.context, state.handle)


def settle_tree(state: _FSDPState, what: str) -> RuntimeContext:
    """Reshard and initialize the tree of ``state``, and return the context."""
    require_between_steps(state, what)
    context = ensure_root(state)
    for handle in context.handles:
        handle.writes.steps += handle.writes.steps_per_reduction
        if handle.kept_for_backward or handle.residency is not SHARDED:
            unshard.end_use(context, handle, reshards=True, kept=False)
    unshard.free_oldest(context, keep=0)
    for unit in root_of(context)._root_states:
        moments.changes.adopt(unit)
    return context
