"""Backward of a unit: hooks on the nodes of the outputs and of the aliased inputs.

Two events drive a unit, and ``graph_task`` ends the units that saw only a part of them:

* *gradients complete*: the hook of each full parameter takes the gradient and
  decrements ``pending``, the number of parameters that this graph task will reach. At 0
  the unit may reduce (``grad_hooks``).
* *parameters no longer needed*: ``input_done`` has run for each input that requires
  grad. With complete gradients the unit reshards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import NO_TASK, BackwardProgress
from composable_fsdp.flat.residency import NOT_GATHERED
from composable_fsdp.phases import BACKWARD_PRE, illegal_move
from composable_fsdp.runtime.grad_hooks import reshard_after_backward, select_full_form
from composable_fsdp.runtime.graph_task import current_task, register_task_end
from composable_fsdp.runtime.prefetch import (
    prefetch_backward,
    prefetch_listed,
    unshard_in_backward,
)
from composable_fsdp.runtime.reduce import reduce_gradients
from composable_fsdp.runtime.unshard import wait_unsharded
from composable_fsdp.runtime.unused_params import send_skipped_uses, will_run
from composable_fsdp.tree.order_logs import enter_backward_use
from composable_fsdp.tree.state import ForwardRecord, RuntimeContext, _FSDPState

RETAINED = 1 << 30
"""Offset of ``open_calls`` for a backward that builds a graph: the unit stays full."""


class UnitForward:
    """One forward of a unit, for the backward that may follow.

    Hooks of the autograd graph hold this object. The object must not hold a node of the
    graph after the forward: the reference cycle would keep the activations alive.
    """

    __slots__ = (
        "aliased",
        "aliases",
        "begin",
        "epoch",
        "held",
        "index",
        "inputs",
        "since",
        "state",
        "tape",
        "task",
        "waiting",
        "wide",
    )

    def __init__(self, state: _FSDPState, tape: ForwardRecord) -> None:
        self.state, self.tape = state, tape
        self.aliases: tuple[Any, ...] = ()
        """Nodes of the aliases of the inputs; emptied at the end of the forward."""
        self.aliased = False
        """Whether the call had an alias, so that ``input_done`` will run."""
        self.inputs: list[tuple[Tensor, int]] = []
        """Input tensors with their versions at the start; emptied at the end of the
        forward."""
        self.held: object = None
        """The arguments, if they include containers; None from the end of the forward
        on."""
        self.index = self.begin = self.since = -1
        """``index``: position of this use in ``tape.order``; -1 in a recomputed
        forward. ``begin``: number of uses that were recorded before the forward began.
        ``since``: sequence number of the next autograd node at the start."""
        self.task = NO_TASK
        """The graph task whose pre-backward has run for this call."""
        self.waiting = 0
        """Aliases whose ``input_done`` has not run yet in this graph task."""
        self.wide, self.epoch = state.handle.form.full_precision, state.handle.epoch
        """Full form and layout number of the unit at the time of the forward."""

    def forget_inputs(self) -> None:
        """Drop the references to the inputs of a forward that has ended or raised."""
        self.aliases, self.inputs, self.held = (), [], None

    def input_done(self, _: object, gradients: tuple[Any, ...]) -> None:
        """Hook of the node of an aliased input: after the last input, reshard the unit.

        The reduction of the unit follows here, if the gradients are complete.
        """
        if self.state.handle.backward.open_calls >= RETAINED:
            _hook_for_next_backward(self, gradients)
        # The engine runs ready nodes by sequence number, highest (youngest) first. The
        # alias is the oldest node of this forward, so all other nodes of the forward
        # have run.
        self.waiting -= 1
        if self.waiting:
            return
        state, tape = self.state, self.tape
        handle, context = state.handle, state.context
        assert context is not None
        progress = handle.backward
        if progress.task != current_task():
            return
        progress.open_calls -= 1
        # Complete gradients alone do not allow a reshard: the last operation that reads
        # the parameters may compute the gradient of an input. Reshard before the
        # reduction, so that the reduce buffer can take the memory of the parameters.
        through = progress.open_calls == 0 and progress.pending == 0
        if through:
            reshard_after_backward(state, handle)
        progress.expected_calls -= 1
        post = handle.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        if post:
            # ``reached`` and not ``self.index``: units inside this unit have run since,
            # so the next unit is the one before the earliest use that backward has
            # reached.
            listed = state.ahead_in_backward
            if tape.reached > 0 and tape.schedule is None and not listed:
                prefetch_backward(context, tape, tape.reached)
        # The reduce-scatter is issued after the prefetch: a backend runs collectives in
        # order. The next unit waits for the all-gather, whereas no compute waits for
        # this reduction until the next reduction is due.
        if (
            through
            and handle.reduce_due
            and state.sync_gradients
            and tape.schedule is None
        ):
            reduce_gradients(context, handle)


def pre_backward(call: UnitForward, aliases: tuple[Any, ...], _: object = None) -> None:
    """Hook of the node of an output: unshard the unit and expect gradients.

    Runs once per forward call and graph task, whichever output comes first.

    Args:
        call: the forward call of the unit.
        aliases: nodes of the aliased inputs, if the call has two or more; else empty.
        _: the gradients of the node; not read.

    Raises: DesyncError, if another rank runs another unit; PhaseError, if the layout of
        the unit has changed since the forward.
    Collective: the all-gather of the unit, if the unit is sharded, and of each unit
        that is prefetched; over the shard group, all ranks of which must call.
    """
    task = current_task()
    if call.task == task:
        return
    call.task = task
    # A single alias is not looked up: if the alias does not run, nothing counts down.
    # Of several aliases, count only the aliases that this graph task will run.
    call.waiting = sum(map(will_run, aliases)) if len(aliases) > 1 else 1
    state = call.state
    handle, context = state.handle, state.context
    assert context is not None
    _require_same_layout(call)
    if handle.backward.task != task:
        _begin_unit_backward(context, state, task)
    mode = handle.plan.options.backward_prefetch
    # A call with an alias ends by ``input_done``, which then reshards and reduces; a
    # call without an alias ends with the graph task.
    if call.aliased:
        handle.backward.expected_calls += 1
    if call.tape.schedule is not None and call.index >= 0:
        send_skipped_uses(context, call.tape, call.index)
    if call.tape not in handle.backward.tapes:
        # First call of this forward record in this graph task: add the open calls of
        # the whole record.
        handle.backward.tapes = (*handle.backward.tapes, call.tape)
        handle.backward.open_calls += call.tape.open_calls.get(handle, 0)
    log = handle.backward_log
    # With a schedule, backward follows the order of the forward, which has been
    # compared.
    if log is not None and call.tape.schedule is None:
        if log.expected[log.position] is handle:
            log.position += 1
        else:
            enter_backward_use(context, log, handle, call.tape.mode)
    # The graph holds the full parameters of the form that the forward used, so backward
    # must use the same form.
    if handle.form.full_precision is not call.wide:
        select_full_form(context, state, wide=call.wide)
    if handle.residency in NOT_GATHERED:
        unshard_in_backward(context, handle)
    wait_unsharded(handle)
    tape = call.tape
    if tape.task != task:
        tape.task, tape.reached = task, call.index
    elif call.index < tape.reached:
        tape.reached = call.index
    if state.ahead_in_backward:
        prefetch_listed(context, state, state.ahead_in_backward)
    elif tape.reached > 0 and mode is BackwardPrefetch.BACKWARD_PRE:
        prefetch_backward(context, tape, tape.reached)


def _hook_for_next_backward(call: UnitForward, gradients: tuple[Any, ...]) -> None:
    """Register a hook that unshards the unit in a backward of this backward.

    The graph of the unit's backward reads the parameters. ``gradients`` are the
    gradients of an aliased input: a second backward enters the graph at their nodes.
    """
    hook = partial(pre_next_backward, call)
    for gradient in gradients:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(hook)


def pre_next_backward(call: UnitForward, _: object = None) -> None:
    """Hook of a gradient's node: unshard the unit until this graph task ends.

    Collective: the all-gather of the unit, if the unit is sharded.
    """
    task, state = current_task(), call.state
    handle, context = state.handle, state.context
    assert context is not None
    _require_same_layout(call)
    if handle.backward.task != task:
        _begin_unit_backward(context, state, task)
    # The last node of the second backward is not known, so no hook counts down; the end
    # of the graph task reshards the unit.
    if handle.backward.open_calls < RETAINED:
        handle.backward.open_calls += RETAINED
    if handle.form.full_precision is not call.wide:
        select_full_form(context, state, wide=call.wide)
    if handle.residency in NOT_GATHERED:
        unshard_in_backward(context, handle)
    wait_unsharded(handle)


def _require_same_layout(call: UnitForward) -> None:
    """Raise if the buffers of the forward are gone because the layout has changed.

    Raises: PhaseError.
    """
    if call.epoch != call.state.handle.epoch:
        raise PhaseError(
            f"Backward reached unit {call.state.name} through a forward that ran "
            "before its parameters changed (requires_grad, a cast, a move, an "
            "assignment), and the buffers of then are gone. Run backward before the "
            "next forward, or change them between steps."
        )


def _begin_unit_backward(context: RuntimeContext, state: _FSDPState, task: int) -> None:
    """Add the unit to the graph task, and count the gradients that the task brings."""
    register_task_end(context, state, task)
    handle = state.handle
    if BACKWARD_PRE not in handle.phase.followers:
        raise illegal_move(handle.name, handle.phase, BACKWARD_PRE)
    handle.phase = BACKWARD_PRE
    # ``_will_engine_execute_node`` raises for the AccumulateGrad node of a parameter if
    # ``autograd.grad`` captures the gradient.
    pending = 0 if context.captures else sum(map(will_run, handle.form.accumulators))
    # With ``create_graph`` the graph of this backward reads the parameters again.
    retained = RETAINED if torch.is_grad_enabled() else 0
    handle.backward = BackwardProgress(task, pending, retained)
    if pending:
        handle.reduce_due = True
