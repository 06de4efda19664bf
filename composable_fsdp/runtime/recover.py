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
from composable_fsdp.flat.gradients import free_cleared
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.integrity import (
    is_regrouped,
    leaves_are_home,
    leaves_view_shards,
    reattach,
)
from composable_fsdp.runtime.buffers import require_filled
from composable_fsdp.runtime.draws import warn_of_equal_draws
from composable_fsdp.runtime.graph_task import current_task, reset_backward
from composable_fsdp.runtime.offload import land, wait_for_copies
from composable_fsdp.runtime.precision import cast_buffers
from composable_fsdp.runtime.reduce import (
    drop_arrived,
    drop_reduction,
    finish_reduction,
)
from composable_fsdp.runtime.regroup import follow_requires_grad
from composable_fsdp.runtime.take_up import take_up, take_up_unless_on_meta
from composable_fsdp.runtime.unshard import reshard, retire, versions
from composable_fsdp.tree.added import PENDING, tell_added_in_forward
from composable_fsdp.tree.root import ensure_root, root_of
from composable_fsdp.tree.state import RuntimeContext, Schedule, Tape, _FSDPState


def begin_iteration(context: RuntimeContext, state: _FSDPState) -> None:
    """Start a forward at ``state``, the outermost unit of this call.

    Units that an earlier forward left full are resharded: the optimizer may have
    changed the shards since. Parameters whose ``requires_grad`` changed move to other
    regions. Sends nothing.

    Raises: PlanError, if a leaf was torn out of its shard and does not fit, or at the
    first forward a buffer was on meta and has no values; PhaseError,
    if ``requires_grad`` changed while gradients wait, or shards were written to under a
    unit that was left full on purpose.
    """
    if context.tasks:
        recover(context, drop_gradients=True)
    elif context.outermost is not None:
        recover(context, drop_gradients=False)
    schedule: Schedule | None = None
    for log in context.forward_logs:
        log.drop()
    context.prefetched.clear()
    for handle in context.handles:
        free_cleared(handle)
        if handle.rule.fill:
            schedule = schedule or Schedule()
        if handle.full_since is not None and is_good(handle):
            continue
        if handle.gathered or handle.is_full:
            reshard(context, handle)
            # Kept for a second backward: its memory stays and is gathered into again.
            handle.gathered = handle.retiring
    for unit in root_of(context)._root_states:
        handle = unit.handle
        if handle.full_since is None and not leaves_are_home(handle):
            take_up(unit)
            if is_regrouped(handle):
                follow_requires_grad(context, handle)
    if context.is_new:
        require_filled(root_of(context)._root_states)
        warn_of_equal_draws(context.handles)
        context.is_new = False
    if PENDING:
        tell_added_in_forward(context)
    for unit in context.lists:
        unit.remaining = frozenset()
    for unit in context.precisions:
        cast_buffers(unit)
    training = state.module.training
    mode = (state.fqn, training, torch.is_grad_enabled())
    context.tape = Tape(mode, schedule)
    streams = context.streams
    if streams is not None:
        streams.compute = torch.cuda.current_stream(state.device)
        # The optimizer wrote the shards on the caller's stream.
        streams.gather.wait_stream(streams.compute)
    context.outermost = state
    context.frame = _module_call()


def is_good(handle: FlatParamHandle) -> bool:
    """Whether a unit that was left full on purpose can be used as it is.

    Not if a leaf was torn out of its shard, or frozen or unfrozen.

    Raises: PhaseError, if its shards were written to.
    """
    shown = handle.is_full
    if shown:
        views.use_sharded(handle)
    if handle.full_since != versions(handle):
        raise PhaseError(
            f"The shards of fully sharded module {handle.name} were written to while "
            "its full parameters were kept (an optimizer step, most likely), so the "
            "next forward would use old values. Before the step call "
            "reshard(module), or set_reshard_after_backward(module, True) before the "
            "backward that comes before the step."
        )
    good = leaves_are_home(handle)
    if good and not leaves_view_shards(handle):
        reattach(handle)
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
            drop_arrived(handle)
    for unit in context.lists:
        unit.remaining = frozenset()
    finish_reduction(context)
    land(context)
    retire(context, keep=0)


def settle(state: _FSDPState, what: str) -> None:
    """Make sure that the tree of ``state`` is between steps, with sharded leaves shown.

    ``what`` names the caller in messages. A tree that has not been initialised is left
    so: a question does not decide who is the root. Sends nothing.

    Raises: PhaseError, inside a forward, a backward, or a block of ``unshard_params``.
    """
    context = state.context
    if context is None:
        take_up_unless_on_meta(state)
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
    wait_for_copies(context)
    handle = state.handle
    if not handle.is_full:
        # A unit that is kept for a backward, after ``p.data = ...``.
        if handle.gathered and not leaves_are_home(handle):
            drop_full(state)
        if not handle.gathered:
            take_up_unless_on_meta(state)


def drop_full(state: _FSDPState) -> None:
    """Reshard a unit that was left full: its shards are written next. Sends nothing.

    After ``settle``. Backward, if one comes, and the next forward gather it again.
    """
    if state.handle.gathered:
        assert state.context is not None
        reshard(state.context, state.handle)


def require_idle(state: _FSDPState, what: str) -> RuntimeContext:
    """Settle the tree of ``state``, initialise it if needed, and return its context.

    Units that were kept between forward and backward are resharded; backward gathers
    them again. Sends nothing.

    Raises: as ``settle``; PlanError, as ``take_up``.
    """
    settle(state, what)
    context = ensure_root(state)
    for handle in context.handles:
        handle.kept = False
        if handle.gathered:
            reshard(context, handle)
    retire(context, keep=0)
    for unit in root_of(context)._root_states:
        take_up(unit)
    return context
