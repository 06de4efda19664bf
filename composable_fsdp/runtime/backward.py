"""Backward of a unit: two events (``graph_task`` ends what they leave).

* *Gradients complete*: the hook of each full leaf takes its gradient and counts down
  from the number of leaves that this graph task will reach. At 0 the unit may reduce
  (``arrivals``).
* *Weights no longer needed*: each input that needs a gradient is an alias whose node
  runs after everything the unit recorded. When the last one has run, and the gradients
  are complete, the unit reshards. Complete gradients alone do not allow it: the last
  use of the weights may be for the gradient of an input.

Where inputs need gradients the first waits for the second, which comes right after it:
reshard, then reduce, so that the reduce buffer takes the place of the weights. With
``BACKWARD_POST`` the next unit is gathered in between. The network serves in order, and
the next unit's compute waits for its parameters, while nobody waits for a reduction
until the next one is complete.

The engine runs nodes by their age, youngest first, and the alias is the oldest node of
its unit: what the unit computed has run when the alias does. What never came is done at
the end of the graph task (``graph_task``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import NO_TASK
from composable_fsdp.phases import Phase
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
"""Open calls of a unit whose backward builds a graph: it stays full."""


class UnitForward:
    """One forward of a unit that a backward may follow.

    Held by hooks of the autograd graph, so it must not hold a node of it: the cycle
    would keep activations alive.
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
        """Nodes of the inputs' aliases, until the end of the forward only."""
        self.aliased = False
        """Whether there were any, so that ``input_done`` can be expected."""
        self.inputs: list[tuple[Tensor, int]] = []
        """Tensors passed in and their versions, until the end of the forward only."""
        self.held: object = None
        """Arguments among which are containers, until the end of the forward only."""
        self.index = self.begin = self.since = -1
        self.task = NO_TASK
        self.waiting = 0
        self.wide, self.epoch = state.handle.wide, state.handle.epoch

    def forget_inputs(self) -> None:
        """Hold nothing of a forward that is over, or raised."""
        self.aliases, self.inputs, self.held = (), [], None

    def input_done(self, _: object, gradients: tuple[Any, ...]) -> None:
        """Hook of an input's alias: count down, and reshard after the last."""
        if self.state.handle.open_calls >= RETAINED:
            _hook_for_next_backward(self, gradients)
        self.waiting -= 1
        if self.waiting:
            return
        state, tape = self.state, self.tape
        handle, context = state.handle, state.context
        assert context is not None
        if handle.task != current_task():
            return
        handle.open_calls -= 1
        through = handle.open_calls == 0 and handle.pending == 0
        if through:
            reshard_after_backward(state, handle)
        handle.expected_calls -= 1
        post = handle.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        if post:
            # Its own index would not do: the units inside it have run since.
            listed = state.ahead_in_backward
            if tape.reached > 0 and tape.schedule is None and not listed:
                prefetch_backward(context, tape, tape.reached)
        # After the prefetch, which is needed sooner: the network serves one at a time.
        if (
            through
            and handle.reduce_due
            and state.sync_gradients
            and tape.schedule is None
        ):
            reduce_gradients(context, handle)


def pre_backward(call: UnitForward, aliases: tuple[Any, ...], _: object = None) -> None:
    """Hook of an output's node: the unit is full, its gradients are expected.

    Runs once per call and graph task, whichever output comes first.

    Collective: the unit's all-gather if it is sharded, and the prefetched units'.
    Raises: DesyncError, if another rank does something else.
    """
    task = current_task()
    if call.task == task:
        return
    call.task = task
    # One alias needs no count. Of several, some may not lead to this loss.
    call.waiting = sum(map(will_run, aliases)) if len(aliases) > 1 else 1
    state = call.state
    handle, context = state.handle, state.context
    assert context is not None
    _require_same_layout(call)
    if handle.task != task:
        _begin_unit_backward(context, state, task)
    mode = handle.plan.options.backward_prefetch
    if call.aliased:
        handle.expected_calls += 1
    if call.tape.schedule is not None and call.index >= 0:
        send_skipped_uses(context, call.tape, call.index)
    if call.tape not in handle.tapes:
        # The first call of its forward that this graph task meets.
        handle.tapes = (*handle.tapes, call.tape)
        handle.open_calls += call.tape.open_calls.get(handle, 0)
    log = handle.backward_log
    # With a schedule the order is that of the forward, which was compared.
    if log is not None and call.tape.schedule is None:
        if log.expected[log.position] is handle:
            log.position += 1
        else:
            enter_backward_use(context, log, handle, call.tape.mode)
    if handle.wide is not call.wide:
        select_full_form(context, state, wide=call.wide)
    if not handle.gathered or handle.retiring:
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
    """Have a backward through the graph of this backward find the unit gathered.

    What the unit's backward computed reads its weights. ``gradients`` are those of an
    input, where a backward of the backward comes in.
    """
    hook = partial(pre_next_backward, call)
    for gradient in gradients:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(hook)


def pre_next_backward(call: UnitForward, _: object = None) -> None:
    """Hook of a gradient's node: the unit is full until this graph task ends.

    Which part of the graph is the unit's last is not known, so nothing counts down.

    Collective: the unit's all-gather, if it is sharded.
    """
    task, state = current_task(), call.state
    handle, context = state.handle, state.context
    assert context is not None
    _require_same_layout(call)
    if handle.task != task:
        _begin_unit_backward(context, state, task)
    if handle.open_calls < RETAINED:
        handle.open_calls += RETAINED
    if handle.wide is not call.wide:
        select_full_form(context, state, wide=call.wide)
    if not handle.gathered or handle.retiring:
        unshard_in_backward(context, handle)
    wait_unsharded(handle)


def _require_same_layout(call: UnitForward) -> None:
    """Refuse a graph over buffers that are gone. Raises: PhaseError."""
    if call.epoch != call.state.handle.epoch:
        raise PhaseError(
            f"Backward reached unit {call.state.name} through a forward that ran "
            "before its parameters changed (requires_grad, a cast, a move, an "
            "assignment), and the buffers of then are gone. Run backward before the "
            "next forward, or change them between steps."
        )


def _begin_unit_backward(context: RuntimeContext, state: _FSDPState, task: int) -> None:
    """Enter the graph task: count the gradients to come."""
    register_task_end(context, state, task)
    handle = state.handle
    handle.phase = Phase.BACKWARD_PRE
    handle.pending = 0
    if not context.captures:  # of captured leaves torch does not answer
        handle.pending = sum(map(will_run, handle.accumulators))
    handle.tapes = ()
    handle.expected_calls = 0
    # create_graph: the graph of this backward needs the weights again.
    handle.open_calls = RETAINED if torch.is_grad_enabled() else 0
    if handle.pending:
        handle.reduce_due = True
