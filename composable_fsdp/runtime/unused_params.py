"""Backward in which every rank sends the same, whatever part of the model it used.

With ``set_reduce_scatter_unused_params`` a rank may get no gradient for a unit that the
others train. Then "reduce when the gradients are complete" is no order that ranks have
in common. What they have in common is the forward: each use of a unit, and which uses
lie inside which. So backward goes through the uses in reverse, and whatever it meets
first does, for the uses that were passed over, what the other ranks do there::

    forward     [ a ] [ b ] [ c ]            uses 0 1 2, of the root 3
    this rank   root, c, a                   the loss does not reach b
    sends       gather c | reduce c, gather b | reduce b, gather a | reduce a, root

A unit is reduced when backward reaches a use before its own forward began. The engine
runs younger nodes first, so its gradients are complete by then or will never come.
BACKWARD_POST has no moment that ranks share, so nothing is prefetched with it.

A backward that was asked for gradients of inputs alone (``autograd.grad``) reduces
nothing: zeros would be gradients that nobody asked for. So all ranks run the same kind.

``torch._C._will_engine_execute_node`` is private; used only here, checked on torch
2.13 and 2.11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.runtime.prefetch import (
    prefetch_backward,
    prefetch_listed,
    unshard_in_backward,
)
from composable_fsdp.runtime.reduce import reduce_gradients
from composable_fsdp.runtime.requested_grads import parameters_not_requested
from composable_fsdp.runtime.unshard import keep_full, reshard, wait_unsharded
from composable_fsdp.tree.order_logs import enter_backward_use
from composable_fsdp.tree.state import (
    BackwardSchedule,
    ForwardRecord,
    RuntimeContext,
    _FSDPState,
)

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether this backward will run a node of the graph."""


def send_skipped_uses(context: RuntimeContext, tape: ForwardRecord, index: int) -> None:
    """Do what comes in backward before use ``index`` and was not done yet.

    ``-1`` means the end of backward.

    Collective: per use that was passed over, the unit's all-gather if it is sharded
    (and the prefetched unit's); per unit whose uses are all passed, its reduction.
    """
    schedule = tape.schedule
    assert schedule is not None
    if tape not in context.filling:
        for younger in tuple(context.filling):
            _finish_later_forwards(context, younger)
        context.filling.append(tape)
        schedule.next = len(schedule.uses)
        schedule.waiting = dict(schedule.begins)
        schedule.accumulates = not parameters_not_requested() or any(
            will_run(node) for each in context.handles for node in each.accumulators
        )
    while schedule.next > index:
        schedule.next -= 1
        at = schedule.next
        for state in [s for s, begin in schedule.waiting.items() if begin > at]:
            del schedule.waiting[state]
            _reduce_in_turn(context, schedule, state)
        handle = schedule.uses[at].handle
        log = handle.backward_log
        if log is not None:
            if log.expected[log.position] is handle:
                log.position += 1
            else:
                enter_backward_use(context, log, handle, tape.mode)
        if at > index:
            _gather_in_turn(context, tape, at)


def _finish_later_forwards(context: RuntimeContext, tape: ForwardRecord) -> None:
    """End the part of ``tape``: this backward has come to a forward before it.

    Which units of it are full still is not equal on all ranks, so none stays full.
    """
    assert tape.schedule is not None
    send_skipped_uses(context, tape, -1)
    for state in tape.schedule.begins:
        _free_unused(context, state)


def finish_unused_params(context: RuntimeContext) -> None:
    """End every backward that was being filled. Collective: as
    ``send_skipped_uses``."""
    tapes = list(context.filling)
    for tape in tapes:
        send_skipped_uses(context, tape, -1)
    context.filling.clear()


def has_arrived(handle: FlatParamHandle) -> bool:
    """Whether a gradient waits to be reduced."""
    return handle.reduce_due and any(1 in r.arrived for r in handle.trainable)


def _gather_in_turn(context: RuntimeContext, tape: ForwardRecord, at: int) -> None:
    assert tape.schedule is not None
    state = tape.schedule.uses[at]
    handle = state.handle
    if not handle.gathered or handle.retiring:
        unshard_in_backward(context, handle)
    pre = handle.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    if state.ahead_in_backward:
        prefetch_listed(context, state, state.ahead_in_backward)
    elif pre and at > 0:
        prefetch_backward(context, tape, at)


def _reduce_in_turn(
    context: RuntimeContext, schedule: BackwardSchedule, state: _FSDPState
) -> None:
    handle = state.handle
    expected = handle.rule.fill and handle.trainable and schedule.accumulates
    if state.sync_gradients and (expected or has_arrived(handle)):
        reduce_gradients(context, handle)
    if handle.task == NO_TASK:
        # Backward did not come by, so nothing else takes the weights away.
        _free_unused(context, state)


def _free_unused(context: RuntimeContext, state: _FSDPState) -> None:
    """Reshard, or keep the weights for the next forward, as the other ranks do."""
    handle = state.handle
    if state.reshard_after_backward:
        reshard(context, handle)
    elif handle.gathered:
        wait_unsharded(handle)
        keep_full(context, handle)
