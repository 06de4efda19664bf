"""Backward of a unit: two events (``graph_task`` ends what they leave).

* *Gradients complete*: the hook of each full leaf copies its gradient into the reduce
  buffer and counts down from the number of leaves that this graph task will reach. At 0
  the unit reduces.
* *Weights no longer needed*: each input that needs a gradient is an alias whose node
runs
  after everything the unit recorded. When the last one has run, and the gradients are
  complete, the unit reshards. Complete gradients alone do not allow it: the last use of
  the weights may be for the gradient of an input.

The engine runs nodes by their age, youngest first, and the alias is the oldest node of
its unit: what the unit computed has run when the alias does.

``torch._C._will_engine_execute_node`` and ``Tensor._post_accumulate_grad_hooks`` are
private; used only here, checked on torch 2.13 (and present in 2.11).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.forms import switch_form
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.fill import catch_up
from composable_fsdp.runtime.graph_task import current_task, join_task
from composable_fsdp.runtime.prefetch import prefetch_backward, prefetch_listed
from composable_fsdp.runtime.reduce import prepare_reduce, reduce_gradients
from composable_fsdp.runtime.unshard import (
    keep_full,
    release,
    reshard,
    unshard,
    wait_unsharded,
)
from composable_fsdp.tree.agree import depart_in_backward
from composable_fsdp.tree.state import RuntimeContext, Tape, _FSDPState

_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node

OURS = -1
"""Key of the arrival hook among the hooks of a full leaf."""

KEEP = 1 << 30
"""Open calls of a unit whose backward builds a graph: it stays full."""


class Call:
    """One forward of a unit that a backward may follow.

    Held by hooks of the autograd graph, so it must not hold a node of it: the cycle
    would keep activations alive.
    """

    __slots__ = (
        "aliases",
        "begin",
        "epoch",
        "index",
        "state",
        "tape",
        "task",
        "waiting",
        "wide",
    )

    def __init__(self, state: _FSDPState, tape: Tape) -> None:
        self.state, self.tape = state, tape
        self.aliases: tuple[Any, ...] = ()
        """Nodes of the inputs' aliases, until the end of the forward only."""
        self.index = self.begin = -1
        self.task = NO_TASK
        self.waiting = 0
        self.wide, self.epoch = state.handle.wide, state.handle.epoch

    def input_done(self, *_: object) -> None:
        """Hook of an input's alias: count down, and reshard after the last."""
        self.waiting -= 1
        if self.waiting:
            return
        handle = self.state.handle
        if handle.task != current_task():
            return
        handle.open_calls -= 1
        if handle.open_calls == 0 and handle.pending == 0:
            _reshard_after_backward(self.state, handle)
        post = handle.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        tape = self.tape
        # Its own index would not do: the units inside it have run since.
        if (
            post
            and tape.reached > 0
            and tape.schedule is None
            and not self.state.ahead_in_backward
        ):
            assert self.state.context is not None
            prefetch_backward(self.state.context, tape, tape.reached)


def pre_backward(call: Call, aliases: tuple[Any, ...], _: object = None) -> None:
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
    call.waiting = sum(map(_will_run, aliases)) if len(aliases) > 1 else 1
    state = call.state
    handle, context = state.handle, state.context
    assert context is not None
    if call.epoch != handle.epoch:
        raise PhaseError(
            f"Backward reached unit {state.name} through a forward that ran before "
            "requires_grad of its parameters changed, and the buffers of then are "
            "gone. Run backward before the next forward, or freeze and unfreeze "
            "between steps."
        )
    if handle.task != task:
        _begin(context, state, task)
    if call.tape.schedule is not None and call.index >= 0:
        catch_up(context, call.tape, call.index)
    if call.tape not in handle.tapes:
        # The first call of its forward that this graph task meets.
        handle.tapes = (*handle.tapes, call.tape)
        handle.open_calls += call.tape.open_calls.get(handle, 0)
    log = handle.backward_log
    # Where gradients are filled up, ranks meet in ``catch_up`` and not here.
    if log is not None and not context.filling:
        if log.expected[log.position] is handle:
            log.position += 1
        else:
            depart_in_backward(context, log, handle, call.tape.mode)
    if handle.wide is not call.wide:
        use_form(context, state, wide=call.wide)
    if not handle.gathered or handle.retiring:
        unshard(context, handle)
    wait_unsharded(handle)
    tape = call.tape
    if tape.task != task:
        tape.task, tape.reached = task, call.index
    elif call.index < tape.reached:
        tape.reached = call.index
    if state.ahead_in_backward:
        prefetch_listed(context, state, state.ahead_in_backward)
    elif (
        tape.reached > 0
        and handle.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    ):
        prefetch_backward(context, tape, tape.reached)


def _begin(context: RuntimeContext, state: _FSDPState, task: int) -> None:
    """Enter the graph task: count the gradients to come, make room for them."""
    join_task(context, state, task)
    handle = state.handle
    handle.phase = Phase.BACKWARD_PRE
    handle.pending = sum(map(_will_run, handle.accumulators))
    handle.tapes = ()
    # create_graph: the graph of this backward needs the weights again.
    handle.open_calls = KEEP if torch.is_grad_enabled() else 0
    if handle.pending:
        prepare_reduce(context, handle)


def arm_leaves(state: _FSDPState) -> None:
    """Attach the arrival hooks to the full leaves of the current form, once."""
    nodes = []
    # Once for all leaves: entering it costs as much as asking two of them.
    with torch.inference_mode(False), torch.enable_grad():
        for region in state.handle.trainable:
            arrivals = make_arrivals(state, region)
            for leaf, arrive in zip(region.full_leaves, arrivals, strict=True):
                # A leaf keeps its node only weakly: the handle does, so that the node
                # we ask the engine about is the node it runs.
                nodes.append(_accumulator(leaf))
                # What register_post_accumulate_grad_hook sets, less its checks and its
                # handle, which took longer than all else. Torch numbers from 0 up.
                leaf._post_accumulate_grad_hooks = OrderedDict({OURS: arrive})
    state.handle.accumulators = tuple(nodes)


def _accumulator(leaf: nn.Parameter) -> object:
    """The node that accumulates into ``leaf``, by way of any node that feeds it.

    Gradients must be enabled.
    """
    alias: Tensor = leaf.view_as(leaf)
    assert alias.grad_fn is not None
    return alias.grad_fn.next_functions[0][0]


def use_form(context: RuntimeContext, state: _FSDPState, *, wide: bool) -> None:
    """Make the unit ready to be full in the parameters' own dtype, or in compute's.

    A unit that is full in the other one gives it up. Sends nothing.
    """
    handle = state.handle
    if handle.wide is wide:
        return
    release(context, handle)
    if switch_form(handle):
        arm_leaves(state)


def make_arrivals(
    state: _FSDPState, region: FlatParameter
) -> list[Callable[[Tensor], None]]:
    """Return the post-accumulate hooks of the region's full leaves.

    Each moves its leaf's gradient into the leaf's view of the reduce buffer: the first
    arrival copies, later ones of the same reduction add.
    """
    # Weakly: the collector does not look into the hooks of a tensor (torch 2.13), so a
    # strong reference would keep the model alive for ever.
    owner = weakref.ref(state)
    return [
        partial(_arrive, owner, region.arrived, index, view)
        for index, view in enumerate(region.reduce_views)
    ]


def _arrive(
    owner: weakref.ref[_FSDPState],
    arrived: bytearray,
    index: int,
    view: Tensor,
    leaf: Tensor,
) -> None:
    unit = owner()
    assert unit is not None
    handle = unit.handle
    gradient = leaf.grad
    # None, if a custom Function returned no gradient: counted, nothing to move.
    if gradient is not None:
        leaf.grad = None
        if torch.is_grad_enabled():
            gradient = gradient.detach()
        if not handle.reduce_is_allocated:
            _late(unit, handle)
        if arrived[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            arrived[index] = 1
    # Of another graph task (a checkpoint inside the unit): only accumulated.
    if handle.task == current_task():
        handle.pending -= 1
        if handle.pending == 0:
            _gradients_complete(unit, handle)


def _late(state: _FSDPState, handle: FlatParamHandle) -> None:
    """A gradient that no pre-backward announced: have somebody reduce it."""
    context = state.context
    assert context is not None
    prepare_reduce(context, handle)
    if handle.task == NO_TASK:
        join_task(context, state, current_task())
        # Nothing counts down, so the final callback reduces.
        handle.pending = -1


def _gradients_complete(state: _FSDPState, handle: FlatParamHandle) -> None:
    context = state.context
    assert context is not None
    # With a schedule, in the unit's turn; see ``fill``.
    scheduled = handle.tapes and handle.tapes[0].schedule is not None
    if state.sync_gradients and not scheduled:
        reduce_gradients(context, handle)
    if handle.open_calls == 0:
        _reshard_after_backward(state, handle)


def _reshard_after_backward(state: _FSDPState, handle: FlatParamHandle) -> None:
    context = state.context
    assert context is not None
    handle.phase = Phase.BACKWARD_POST
    if state.reshard_after_backward:
        reshard(context, handle)
    else:
        keep_full(context, handle)
