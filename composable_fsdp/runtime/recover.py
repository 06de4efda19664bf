"""Where an iteration begins, and what puts a tree in order after one that broke.

A raise in forward passes the hooks, so the units are resharded at once. A raise in
backward passes nothing of ours: whoever comes next (a forward, ``unshard_params``, a
state dict) finds graph tasks that never ended and clears them. Resharding is local; no
peer is waited for.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import views
from composable_fsdp.flat.external_changes import (
    leaves_view_shards,
    requires_grad_changed,
    restore_shard_views,
    shards_are_unchanged,
)
from composable_fsdp.flat.gradients import free_cleared
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.runtime.equal_init import warn_of_equal_init
from composable_fsdp.runtime.external_changes import (
    adopt_external_changes,
    adopt_external_changes_unless_meta,
)
from composable_fsdp.runtime.graph_task import current_task, reset_backward
from composable_fsdp.runtime.meta_buffers import require_filled
from composable_fsdp.runtime.offload import (
    finish_d2h_grad_copies,
    synchronize_copy_stream,
)
from composable_fsdp.runtime.precision import cast_buffers
from composable_fsdp.runtime.reduce import (
    drop_reduction,
    drop_unreduced_grads,
    finish_reduction,
)
from composable_fsdp.runtime.requires_grad import follow_requires_grad
from composable_fsdp.runtime.unshard import free_oldest, reshard, shard_versions
from composable_fsdp.tree.late_registration import PENDING, warn_of_added_in_forward
from composable_fsdp.tree.root import ensure_root, root_of
from composable_fsdp.tree.state import (
    BackwardSchedule,
    ForwardRecord,
    RuntimeContext,
    _FSDPState,
)


def begin_iteration(context: RuntimeContext, state: _FSDPState) -> None:
    """Start a forward at ``state``, the outermost unit of this call.

    Units that an earlier forward left full are resharded: the optimizer may have
    changed the shards since. Parameters whose ``requires_grad`` changed move to other
    regions. Sends nothing.

    Raises: PlanError, if a leaf was torn out of its shard and does not fit, or at the
    first forward a buffer was on meta and has no values; PhaseError, if
    ``requires_grad`` changed while gradients wait, or shards were written to under a
    unit that was left full on purpose.
    """
    if context.tasks:
        recover(context, drop_gradients=True)
    elif context.outermost is not None:
        recover(context, drop_gradients=False)
    schedule: BackwardSchedule | None = None
    for log in context.forward_logs:
        log.drop()
    context.prefetched.clear()
    for handle in context.handles:
        free_cleared(handle)
        if handle.rule.fill:
            schedule = schedule or BackwardSchedule()
        if handle.full_since is not None and require_current_full_params(handle):
            continue
        if handle.gathered or handle.is_full:
            reshard(context, handle)
            # Kept for a second backward: its memory stays and is gathered into again.
            handle.gathered = handle.retiring
    for unit in root_of(context)._root_states:
        handle = unit.handle
        if handle.full_since is None and not shards_are_unchanged(handle):
            adopt_external_changes(unit)
            if requires_grad_changed(handle):
                follow_requires_grad(context, handle)
    if context.is_new:
        require_filled(root_of(context)._root_states)
        warn_of_equal_init(context.handles)
        context.is_new = False
    if PENDING:
        warn_of_added_in_forward(context)
    for unit in context.lists:
        unit.remaining = frozenset()
    for unit in context.precisions:
        cast_buffers(unit)
    training = state.module.training
    mode = (state.fqn, training, torch.is_grad_enabled())
    context.tape = ForwardRecord(mode, schedule)
    streams = context.streams
    if streams is not None:
        streams.compute = torch.cuda.current_stream(state.device)
        # The optimizer wrote the shards on the caller's stream.
        streams.gather.wait_stream(streams.compute)
    context.outermost = state
    context.frame = _module_call()


def require_current_full_params(handle: FlatParamHandle) -> bool:
    """Whether a unit that was left full on purpose can be used as it is.

    Not if a leaf was torn out of its shard, or frozen or unfrozen.

    Raises: PhaseError, if its shards were written to.
    """
    shown = handle.is_full
    if shown:
        views.use_sharded(handle)
    if handle.full_since != shard_versions(handle):
        raise PhaseError(
            f"The shards of fully sharded module {handle.name} were written to while "
            "its full parameters were kept (an optimizer step, most likely), so the "
            "next forward would use old values. Before the step call "
            "reshard(module), or set_reshard_after_backward(module, True) before the "
            "backward that comes before the step."
        )
    good = shards_are_unchanged(handle)
    if good and not leaves_view_shards(handle):
        restore_shard_views(handle)
        good = False
    if shown and good:
        views.use_full(handle)
    return good


def _module_call() -> FrameType | None:
    """The nearest call of a module: it lasts as long as that module's forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame


def is_live(context: RuntimeContext) -> bool:
    """Whether the forward that began the iteration is still running.

    A KeyboardInterrupt passes no hook of a module, so it leaves the iteration open.
    """
    if context.frame is None:
        return True  # begun by something else than a module's call: nobody can tell
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not context.frame:
        frame = frame.f_back
    return frame is not None


def recover(context: RuntimeContext, *, drop_gradients: bool) -> None:
    """Reshard every unit and forget the forwards and backwards that were under way.

    ``drop_gradients`` also discards gradients that arrived and were not reduced. Waits
    for collectives of this rank that were issued; sends nothing.
    """
    context.outermost = context.frame = None
    context.tasks.clear()
    context.dead.clear()
    context.filling.clear()
    context.prefetched.clear()
    for log in (*context.forward_logs, *context.backward_logs):
        log.drop()
    if drop_gradients:
        # Not settled: the user may have zeroed the gradients since backward raised.
        drop_reduction(context)
    for handle in context.handles:
        for call in handle.calls:
            if call is not None:
                call.forget_inputs()
        handle.calls.clear()
        handle.lent.clear()
        reset_backward(handle)
        handle.kept = False
        reshard(context, handle)
        if drop_gradients:
            drop_unreduced_grads(handle)
    for unit in context.lists:
        unit.remaining = frozenset()
    finish_reduction(context)
    finish_d2h_grad_copies(context)
    free_oldest(context, keep=0)


def require_between_steps(state: _FSDPState, what: str) -> None:
    """Make sure that the tree of ``state`` is between steps, with sharded leaves shown.

    ``what`` names the caller in messages. A tree that has not been initialised is left
    so: a question does not decide who is the root. Sends nothing.

    Raises: PhaseError, inside a forward, a backward, or a block of ``unshard_params``.
    """
    context = state.context
    if context is None:
        adopt_external_changes_unless_meta(state)
        return
    if context.outermost is not None and not is_live(context):
        recover(context, drop_gradients=False)
    if context.outermost is not None:
        raise PhaseError(
            f"{what} was called on {state.name} inside the forward of "
            f"{context.outermost.name}, where units are full by turns. Call it between "
            "steps."
        )
    if current_task() != NO_TASK:
        raise PhaseError(
            f"{what} was called on {state.name} inside backward, where units are full "
            "by turns. Call it after loss.backward() has returned."
        )
    if context.summoned is not None:
        raise PhaseError(
            f"{what} was called on {state.name} inside unshard_params of "
            f"{context.summoned.name}; the two would write the same shards. Call it "
            "after the block."
        )
    if context.tasks:
        recover(context, drop_gradients=True)
    # The caller may write shards on the host.
    synchronize_copy_stream(context)
    handle = state.handle
    if not handle.is_full:
        # A unit that is kept for a backward, after ``p.data = ...``.
        if handle.gathered and not shards_are_unchanged(handle):
            free_all_full_params(state)
        if not handle.gathered:
            adopt_external_changes_unless_meta(state)


def free_all_full_params(state: _FSDPState) -> None:
    """Reshard a unit that was left full: its shards are written next. Sends nothing.

    After ``require_between_steps``. Backward, if one comes, and the next forward gather
    it again.
    """
    if state.handle.gathered:
        assert state.context is not None
        reshard(state.context, state.handle)


def require_idle(state: _FSDPState, what: str) -> RuntimeContext:
    """Settle the tree of ``state``, initialise it if needed, and return its context.

    Units that were kept between forward and backward are resharded; backward gathers
    them again. Sends nothing.

    Raises: as ``require_between_steps``; PlanError, as ``adopt_external_changes``.
    """
    require_between_steps(state, what)
    context = ensure_root(state)
    for handle in context.handles:
        handle.kept = False
        if handle.gathered:
            reshard(context, handle)
    free_oldest(context, keep=0)
    for unit in root_of(context)._root_states:
        adopt_external_changes(unit)
    return context
