"""Backward in which all ranks issue equal collectives, whichever parameters they use.

With ``set_reduce_scatter_unused_params`` a rank may get no gradient for a unit that
other ranks train. "Reduce when the gradients are complete" is then not the same order
on all ranks. The forward is the same on all ranks: the uses of units, and which uses
lie inside which. Backward therefore goes through the uses in reverse. When backward
reaches a use, the rank first issues, for the uses that were skipped, the collectives
that the other ranks issue there::

    forward     [ a ] [ b ] [ c ]            uses 0 1 2, of the root 3
    this rank   root, c, a                   the loss does not reach b
    sends       gather c | reduce c, gather b | reduce b, gather a | reduce a, root

A unit is reduced when backward reaches a use before the first forward of that unit
began.

``torch._C._will_engine_execute_node`` is private; used only here, checked on torch 2.13
and 2.11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.flat.gradients import has_arrived
from composable_fsdp.flat.handle import NO_TASK
from composable_fsdp.flat.residency import NOT_GATHERED, SHARDED
from composable_fsdp.runtime.reduce import reduce_gradients, unshard_in_backward
from composable_fsdp.runtime.requested_grads import parameters_not_requested
from composable_fsdp.runtime.unshard import (
    keep_full,
    prefetch_backward,
    prefetch_listed,
    reshard,
    wait_unsharded,
)
from composable_fsdp.tree.state import (
    BackwardSchedule,
    ForwardRecord,
    RuntimeContext,
    _FSDPState,
)

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the graph task that is running will execute the node."""


def send_skipped_uses(context: RuntimeContext, tape: ForwardRecord, index: int) -> None:
    """Issue the collectives of all uses after use ``index`` that were not issued yet.

    Args:
        context: the context of the tree.
        tape: the record of the forward, with a schedule.
        index: the use that backward has reached; -1 at the end of backward.

    Raises: DesyncError, if another rank is at another use.
    Collective: for every skipped use the all-gather of the unit, if the unit is
        sharded, and any prefetch that the use triggers; for every unit with no uses
        left, the reduction.
    """
    schedule = tape.schedule
    assert schedule is not None
    if tape not in context.filling:
        finish_later_forwards(context)
        context.filling.append(tape)
        schedule.next = len(schedule.uses)
        schedule.waiting = dict(schedule.begins)
        # A backward of ``autograd.grad`` with respect to other tensors reduces nothing:
        # zeros would become gradients that the user did not ask for. All ranks must
        # therefore run the same kind of backward.
        schedule.accumulates = not parameters_not_requested() or any(
            will_run(node)
            for each in context.handles
            for node in each.form.accumulators
        )
    while schedule.next > index:
        schedule.next -= 1
        at = schedule.next
        # The engine runs younger nodes first, so when backward reaches a use before the
        # first forward of a unit began, the gradients of that unit are complete or will
        # never come.
        for state in [s for s, begin in schedule.waiting.items() if begin > at]:
            del schedule.waiting[state]
            _reduce_in_turn(context, schedule, state)
        handle = schedule.uses[at].handle
        log = handle.logs.backward
        if log is not None:
            if log.expected[log.position] is handle:
                log.position += 1
            else:
                context.enter_backward_use(log, handle, tape.mode)
        if at > index:
            _gather_in_turn(context, tape, at)


def finish_later_forwards(context: RuntimeContext) -> None:
    """Finish the backward of the forwards so far: backward has reached an earlier one.

    Which units of these forwards are still full differs between ranks, so reshard all
    of them, or keep all that are configured so. Collective: as ``send_skipped_uses``.
    """
    for tape in tuple(context.filling):
        assert tape.schedule is not None
        send_skipped_uses(context, tape, -1)
        for state in tape.schedule.begins:
            _free_unused(context, state)


def finish_unused_params(context: RuntimeContext) -> None:
    """Finish the backward of each forward that runs with a schedule.

    Collective: as ``send_skipped_uses``.
    """
    tapes = list(context.filling)
    for tape in tapes:
        send_skipped_uses(context, tape, -1)
    context.filling.clear()


def _gather_in_turn(context: RuntimeContext, tape: ForwardRecord, at: int) -> None:
    """Unshard the unit of skipped use ``at``, and prefetch as in a normal backward."""
    assert tape.schedule is not None
    state = tape.schedule.uses[at]
    handle = state.handle
    if handle.residency in NOT_GATHERED:
        unshard_in_backward(context, handle)
    # BACKWARD_POST has no point in time that is the same on all ranks, so only
    # BACKWARD_PRE and listed units are prefetched.
    pre = handle.layout.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    if state.ahead_in_backward:
        prefetch_listed(context, state, state.ahead_in_backward)
    elif pre and at > 0:
        prefetch_backward(context, tape, at)


def _reduce_in_turn(
    context: RuntimeContext, schedule: BackwardSchedule, state: _FSDPState
) -> None:
    """Reduce the unit in turn, with zeros for parameters without a gradient."""
    handle = state.handle
    expected = handle.rule.fill and handle.layout.trainable and schedule.accumulates
    if state.settings.sync_gradients and (expected or has_arrived(handle)):
        reduce_gradients(context, handle)
    if handle.backward.task == NO_TASK:
        # Backward has not reached the unit, so no other hook reshards the unit.
        _free_unused(context, state)


def _free_unused(context: RuntimeContext, state: _FSDPState) -> None:
    """Reshard the unit, or keep the unit full for the next forward if so configured."""
    handle = state.handle
    if handle.running.calls:
        # This backward runs inside a forward of the unit (``torch.func.vjp``), which
        # still reads the parameters.
        return
    if state.settings.reshard_after_backward:
        reshard(context, handle)
    elif handle.residency is not SHARDED:
        wait_unsharded(handle)
        keep_full(context, handle)
