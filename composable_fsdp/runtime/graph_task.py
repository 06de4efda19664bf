"""A graph task: one run of the autograd engine, and what its end still has to do.

A unit joins the task whose backward reaches it. The engine calls back at the end of a
task that went well; of one that raised it drops the callback, which notes it.

``torch._C._current_graph_task_id`` and the engine's ``queue_callback`` are private;
used only here, checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from composable_fsdp.comm.device import wait_for_step
from composable_fsdp.flat import views
from composable_fsdp.flat.flat_parameter import move_gradients_in
from composable_fsdp.flat.grad_samples import SAMPLE_REQUEST, sample_gradients
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.offload import finish_d2h_grad_copies
from composable_fsdp.runtime.reduce import (
    drop_reduction,
    drop_unreduced_grads,
    finish_reduction,
    reduce_gradients,
)
from composable_fsdp.runtime.unshard import (
    free_oldest,
    keep_full,
    reshard,
)
from composable_fsdp.runtime.unused_params import finish_unused_params, has_arrived
from composable_fsdp.tree.root import root_of
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the backward that this thread runs; ``NO_TASK`` outside."""
_engine = torch.autograd.Variable._execution_engine


def register_task_end(context: RuntimeContext, state: _FSDPState, task: int) -> None:
    """Have the end of graph task ``task`` finish this unit."""
    if task not in context.tasks:
        if context.dead:
            reset_failed_graph_tasks(context)
        if context.streams is not None:
            # Since the forward, behind which gathers are, shards may have changed.
            wait_for_step(context.streams)
        context.tasks[task] = []
        _engine.queue_callback(TaskEnd(context, task))
    context.tasks[task].append(state)
    state.handle.task = task


class TaskEnd:
    """The callback at the end of a graph task; dropped uncalled, it notes that it died.

    The engine holds it with the graph task, and lets go of both when backward raises.
    """

    __slots__ = ("context", "task")

    def __init__(self, context: RuntimeContext, task: int) -> None:
        self.context, self.task = context, task

    def __call__(self) -> None:
        """Finish the units of the task."""
        finish_task(self.context, self.task)

    def __del__(self) -> None:
        if self.task in self.context.tasks:
            self.context.dead.add(self.task)
            _show_sharded(self.context, self.task)


def _show_sharded(context: RuntimeContext, task: int) -> None:
    """Show the originals where graph task ``task`` died, for what asks next for them.

    ``model.zero_grad()`` after a backward that raised has to reach them. The memory of
    the full parameters stays until ``reset_failed_graph_tasks`` or ``recover``. Sends
    nothing.

    On CUDA the engine's thread may come here a moment after ``backward`` raised, when
    the program is already on its way; so units that a forward or another graph task has
    taken up since are left alone.
    """
    for state in context.tasks[task]:
        handle = state.handle
        if handle.task == task and handle.is_full and not handle.calls:
            views.use_sharded(handle)
    if context.outermost is None and context.tasks.keys() <= context.dead:
        for handle in context.handles:
            # Its backward was to come yet: prefetched, or unsharded by hand.
            if handle.is_full and not handle.calls:
                views.use_sharded(handle)


def reset_failed_graph_tasks(context: RuntimeContext) -> None:
    """Reset units of graph tasks that raised; their unreduced gradients are dropped.

    Waits for collectives of this rank that were issued; sends nothing.
    """
    dead, context.dead = context.dead, set()
    context.filling.clear()
    for log in context.backward_logs:
        log.drop()
    drop_reduction(context)
    for task in dead:
        for state in context.tasks.pop(task, ()):
            handle = state.handle
            if handle.task == task:
                reset_backward(handle)
                drop_unreduced_grads(handle)
                reshard(context, handle)


def reset_backward(handle: FlatParamHandle) -> None:
    """Forget the graph task that the unit was in."""
    handle.task, handle.pending, handle.open_calls = NO_TASK, 0, 0
    handle.tapes, handle.expected_calls = (), 0
    handle.phase = Phase.IDLE


def finish_task(context: RuntimeContext, task: int) -> None:
    """End of a graph task: reduce and reshard what the events left, reset the units.

    The end of the outermost task also reshards units whose backward never came, and
    orders the caller's stream, and the host's reads of offloaded gradients, behind the
    last reduction. A backward that built a graph keeps its units in memory until the
    next one ends.

    Collective: the reductions of units whose gradients came unannounced.
    Raises: DesyncError, if another rank had more to send.
    """
    keep = torch.is_grad_enabled()
    if context.filling and len(context.tasks) == 1:
        finish_unused_params(context)
    for state in context.tasks.pop(task, ()):
        handle = state.handle
        if handle.task != task:
            continue
        reset_backward(handle)
        if state.sync_gradients and has_arrived(handle):
            reduce_gradients(context, handle)
        if handle.calls:
            # This backward ran inside its forward, which has use for it.
            handle.phase = Phase.FORWARD
            continue
        handle.kept = keep
        if state.reshard_after_backward:
            reshard(context, handle)
        else:
            keep_full(context, handle)
    if context.tasks:
        return
    root = root_of(context)
    for state in root._all_fsdp_states:
        handle = state.handle
        waits = handle.held is not None and handle.rule.all_reduce
        if (handle.reduce_due or waits) and state.sync_gradients:
            # Arrived under no_sync, or waits for its replicas, and this backward did
            # not come by.
            reduce_gradients(context, handle)
        if not keep and context.outermost is None:
            handle.kept = False
            if not state.reshard_after_backward:
                keep_full(context, handle)
            elif handle.gathered or handle.is_full:
                reshard(context, handle)
    context.prefetched.clear()
    if root.is_last_backward:
        finish_reduction(context)
        finish_d2h_grad_copies(context)
        move_gradients_in(context.handles)
        if SAMPLE_REQUEST.backwards:
            sample_gradients(context.handles)
    free_oldest(context, keep=0)
    for log in context.backward_logs:
        log.end()
