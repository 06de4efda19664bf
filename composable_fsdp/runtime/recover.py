"""Where an iteration begins, and what puts a tree in order after one that broke.

A raise in forward passes the hooks, so the units are resharded at once. A raise in backward
passes nothing of ours: whoever comes next (a forward, ``unshard_params``, a state dict) finds
graph tasks that never ended and clears them. Resharding is local; no peer is waited for.
"""

from __future__ import annotations

import torch

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import views
from composable_fsdp.flat.handle import NO_TASK
from composable_fsdp.flat.integrity import require_leaves
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.backward import current_task
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import reshard, retire
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import RuntimeContext, Tape, _FSDPState


def begin_iteration(context: RuntimeContext, state: _FSDPState) -> None:
    """Start a forward at ``state``, the outermost unit of this call.

    Units that an earlier forward left full are resharded: the optimizer may have changed
    the shards since. Sends nothing.

    Raises: PlanError, if a leaf was torn out of its shard and does not fit.
    """
    if context.tasks:
        recover(context, drop_gradients=True)
    for handle in context.handles:
        if handle.gathered or handle.is_full:
            reshard(context, handle)
        require_leaves(handle)
    for unit in context.lists:
        unit.remaining.clear()
    context.tape = Tape()
    streams = context.streams
    if streams is not None:
        streams.compute = torch.cuda.current_stream(state.device)
        # The optimizer wrote the shards on the caller's stream.
        streams.gather.wait_stream(streams.compute)
    context.outermost = state


def recover(context: RuntimeContext, *, drop_gradients: bool) -> None:
    """Reshard every unit and forget the forwards and backwards that were under way.

    ``drop_gradients`` also discards gradients that arrived and were not reduced. Waits for
    collectives of this rank that were issued; sends nothing.
    """
    context.outermost = None
    context.tasks.clear()
    for handle in context.handles:
        for call in handle.calls:
            if call is not None:
                call.aliases = ()
        handle.calls.clear()
        handle.task, handle.pending, handle.open_calls = NO_TASK, 0, 0
        handle.phase = Phase.IDLE
        reshard(context, handle)
        if drop_gradients and handle.reduce_is_allocated:
            views.free_reduce(handle)
            views.forget_arrived(handle)
            handle.reduce_is_allocated = False
    for unit in context.lists:
        unit.remaining.clear()
    finish_reduction(context)
    retire(context, keep=0)


def require_idle(state: _FSDPState, what: str) -> RuntimeContext:
    """Return the context of a tree that is between steps, with every unit sharded.

    ``what`` names the caller in messages. Sends nothing.

    Raises: PhaseError, inside a forward, a backward, or a block of ``unshard_params``.
    """
    context = ensure_root(state)
    if context.outermost is not None:
        raise PhaseError(
            f"{what} was called on {state.name} inside the forward of "
            f"{context.outermost.name}, where units are full by turns. Call it between steps."
        )
    if current_task() != NO_TASK:
        raise PhaseError(
            f"{what} was called on {state.name} inside backward, where units are full by turns. "
            "Call it after loss.backward() has returned."
        )
    if context.summoned is not None:
        raise PhaseError(
            f"{what} was called on {state.name} inside unshard_params of "
            f"{context.summoned.name}; the two would write the same shards. Call it after the "
            "block."
        )
    if context.tasks:
        recover(context, drop_gradients=True)
    for handle in context.handles:
        if handle.gathered or handle.is_full:
            reshard(context, handle)
    retire(context, keep=0)
    return context
