"""Graph tasks: a graph task is one run of the autograd engine.

A unit joins the task whose backward reaches it, and ``TaskEnd`` finishes its units. If
backward raises, the engine drops ``TaskEnd`` uncalled, which marks the task as dead.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

import torch

from composable_fsdp.comm.operations import (
    OPEN,
    begin_range,
    end_all_ranges,
    end_range,
    profiler,
)
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import residency
from composable_fsdp.flat.flat_parameter import FLAT_PARAMS, move_own_gradients
from composable_fsdp.flat.gradients import has_arrived
from composable_fsdp.flat.handle import (
    LEAVES,
    NO_BACKWARD,
    NO_TASK,
    BackwardProgress,
    FlatParamHandle,
)
from composable_fsdp.flat.param_ref import place_path
from composable_fsdp.flat.residency import SHARDED, find_changed
from composable_fsdp.naming import quoted
from composable_fsdp.phases import BACKWARD_PRE, IDLE, SUMMON, Phase
from composable_fsdp.runtime.offload import finish_d2h_grad_copies
from composable_fsdp.runtime.reduce import (
    drop_reduction,
    drop_unreduced_grads,
    finish_reduction,
    reduce_gradients,
)
from composable_fsdp.runtime.unshard import (
    end_use,
    free_oldest,
    reshard,
)
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, is_below, root_of

# These three of torch are private; used here only, checked on torch 2.13 and 2.11.
current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the id of this thread's graph task; ``NO_TASK`` outside backward."""
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the graph task that is running will execute the node."""
FSDP_HOOK_KEY = -1
"""Key of our hook in the hook dicts of a full parameter and of a module's forward."""
_engine = torch.autograd.Variable._execution_engine
BACKWARDS: dict[int, int] = {}
"""By thread: number of calls of autograd's engine that are running there."""
# Of the process: on CUDA, hooks run in a thread of the engine.
_other_requests = 0
"""Number of running backwards that were asked for gradients of other tensors only."""


def run_backward(
    run: Callable[..., Any],
    refuse: Callable[[Sequence[Any]], Any],
    outputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the engine by ``run``; ``refuse`` inputs that are sharded parameters."""
    global _other_requests
    # ``args``: grad_outputs, retain_graph, create_graph, inputs.
    of_others = len(args) > 3 and bool(args[3])
    if of_others:
        # A sharded parameter, or a flat parameter.
        ids = set(map(id, args[3]))
        if ids & LEAVES.keys() or ids & FLAT_PARAMS.keys():
            refuse(args[3])
        # ``backward(inputs=...)`` accumulates, and the unit reduces as ever.
        for each in () if kwargs.get("accumulate_grad") else args[3]:
            hooks = getattr(each, "_post_accumulate_grad_hooks", None) or {}
            if FSDP_HOOK_KEY in hooks and (region := hooks[FSDP_HOOK_KEY].__self__()):
                raise _full_param_requested(region.reduce.owner().handle, each)
    thread = get_ident()
    BACKWARDS[thread] = BACKWARDS.get(thread, 0) + 1
    _other_requests += of_others
    try:
        return run(outputs, *args, **kwargs)
    except RuntimeError as error:
        changed, sharded = find_changed(str(error))
        if changed and sharded:
            raise PhaseError(
                f"Backward needs parameter {changed[0]} while it is sharded: it came "
                "to its unit through a tensor that the unit's forward did not return, "
                "or after the unit had given its weights up. Return the tensor from "
                "the forward (an auxiliary loss as a second output), or keep it on an "
                "attribute of the unit's module from the first forward on."
            ) from error
        if changed:
            raise PhaseError(
                "Backward needs a tensor as it was in the forward, and it was written "
                f"to since. Parameter {' or '.join(changed[:4])} was: an optimizer "
                "step, load_state_dict, set_full_param or a write in place came "
                "between the forward and its backward. Run backward before. torch "
                f"says: {error}"
            ) from error
        raise
    finally:
        _other_requests -= of_others
        BACKWARDS[thread] -= 1
        if not BACKWARDS[thread]:
            del BACKWARDS[thread]


def _full_param_requested(handle: FlatParamHandle, leaf: object) -> PhaseError:
    """Return the error for ``autograd.grad`` with respect to a full parameter."""
    shown = [each is leaf for each in handle.form.placed]
    return PhaseError(
        "torch.autograd.grad was asked for the gradient of full parameter "
        f"{quoted(place_path(handle, shown.index(True)))}, which unit {handle.name} "
        "has shown since unshard or in a forward: the result would be that of this "
        "rank's batch alone. Call backward() and read .grad, which is averaged over "
        "ranks."
    )


def earlier_forward(what: str) -> PhaseError:
    """Return the error of a backward that reaches ``what`` by a graph of before."""
    return PhaseError(
        f"Backward reached {what} through a forward that ran before the unit's "
        "parameters were frozen, unfrozen, cast, moved or replaced. Run backward "
        "before the next forward, or change parameters between steps."
    )


def parameters_not_requested() -> bool:
    """Return whether a backward runs whose ``inputs`` are no sharded parameters."""
    return _other_requests > 0


# ---- a second thread that uses a tree while a first thread is inside ----------


def require_not_elsewhere(context: RuntimeContext) -> None:
    """Raise PhaseError if a forward of the tree runs in another thread."""
    if runs_elsewhere(context):
        raise _second_thread(context, "forward")


def runs_elsewhere(context: RuntimeContext) -> bool:
    """Return whether a forward of the tree runs in another thread."""
    frame = context.frame
    # Usually the frame is a few frames up in this thread. Only a tree that is in use
    # already visits every thread.
    return (
        frame is not None
        and not is_below(frame, sys._getframe(1))
        and any(is_below(frame, top) for top in sys._current_frames().values())
    )


def require_no_other_backward(context: RuntimeContext) -> None:
    """Raise PhaseError if a backward of the tree runs in another thread."""
    # A backward that raised may not be marked as dead yet, because a thread of the
    # engine does so; then no call of the engine runs in another thread.
    live = context.tasks.keys() - context.dead
    # A backward inside a backward has a task of its own, in the same thread. The engine
    # does not tell whose backward another thread runs.
    if live and BACKWARDS.keys() - {get_ident()} and BACKWARDS.get(get_ident(), 0) < 2:
        raise _second_thread(context, "backward")


def _second_thread(context: RuntimeContext, what: str) -> PhaseError:
    """Return the error of a thread that uses a tree in use."""
    return PhaseError(
        f"Thread {threading.current_thread().name!r} uses model "
        f"{root_of(context).title}, whose {what} runs in another thread. All units of "
        "a model send collectives in one order, so one thread at a time may be inside "
        "the model. Let the threads take turns, or give each thread a model of its own "
        "over process groups of its own."
    )


def register_task_end(context: RuntimeContext, state: _FSDPState, task: int) -> None:
    """Add the unit to graph task ``task``; the end of the task will finish the unit."""
    if state.handle.phase is SUMMON:
        assert context.summoned is not None
        raise context.summoned.refusal(f"Backward of {state.name} was called")
    if task not in context.tasks:
        if context.dead:
            reset_failed_graph_tasks(context)
        # On CUDA the engine's thread runs this, and stands for any caller.
        if context.streams.host_waits:
            if context.tasks:
                require_no_other_backward(context)
            if context.frame is not None:
                require_not_elsewhere(context)
        else:
            # The gather stream waited for the caller's stream when the forward began.
            # The shards may have changed since (an optimizer step), so wait again.
            context.streams.wait_for_step()
        context.tasks[task] = []
        _engine.queue_callback(TaskEnd(context, task))
    context.tasks[task].append(state)


def begin_unit_backward(context: RuntimeContext, state: _FSDPState, task: int) -> None:
    """Add the unit to the graph task, and count the gradients that the task brings."""
    register_task_end(context, state, task)
    handle = state.handle
    if profiler._is_profiler_enabled:
        begin_range("backward", context, handle.full_fqn)
    handle.phase = BACKWARD_PRE
    # With ``create_graph`` the graph of this backward reads the parameters again.
    retained, pending = torch.is_grad_enabled(), len(handle.form.accumulators)
    handle.backward = progress = BackwardProgress(task, pending, retained)
    # A leaf with a form has a gradient of another class; with ``create_graph`` a
    # gradient requires grad.
    usual = None if handle.layout.forms or retained else progress
    for region in handle.layout.trainable:
        handle.reduction.due = True
        region.reduce.progress = usual


def awaits_gradients(handle: FlatParamHandle) -> bool:
    """Return whether the graph task will bring gradients that have not arrived."""
    arrived = b"".join([each.reduce.arrived for each in handle.layout.trainable])
    return 0 in arrived and any(
        will_run(node)
        for node, hit in zip(handle.form.accumulators, arrived, strict=False)
        if not hit
    )


class TaskEnd:
    """Callback at the end of a graph task; dropped uncalled, the task is dead."""

    __slots__ = ("context", "task")

    def __init__(self, context: RuntimeContext, task: int) -> None:
        self.context, self.task = context, task

    def __call__(self) -> None:
        """Finish the units of the graph task."""
        tasks, task = self.context.tasks, self.task
        states = tasks.get(task, [])
        try:
            if torch._C._functorch.peek_interpreter_stack() is None:
                finish_task(self.context, task)
                return
            # The pull of ``torch.func.vjp`` ends inside the transform. Gradients that
            # an earlier backward left under ``no_sync`` are reduced here, and are no
            # values of the transform.
            with torch._C._DisableFuncTorch():
                finish_task(self.context, task)
        except BaseException:
            # As if an operation had raised: gradients that were not reduced must not
            # reach a later backward.
            tasks[task] = states
            self._die()
            raise

    def __del__(self) -> None:
        """Mark the graph task as dead if ``finish_task`` has not finished the task."""
        if self.task in self.context.tasks:
            self._die()

    def _die(self) -> None:
        """Mark the graph task as dead; the modules show their sharded parameters."""
        self.context.dead.add(self.task)
        _show_sharded(self.context, self.task)


def _show_sharded(context: RuntimeContext, task: int) -> None:
    """Put the sharded parameters of dead graph task ``task`` back into the modules."""
    # ``model.zero_grad()`` after a backward that raised must reach the sharded
    # parameters. On CUDA a thread of the engine may run this code a moment after
    # ``backward`` raised, while the main thread continues. Units that a forward or
    # another graph task has taken up since are therefore skipped.
    for state in context.tasks[task]:
        handle = state.handle
        for region in handle.layout.trainable:
            region.reduce.progress = None  # no gradient of a later task is usual
        if handle.backward.task == task and handle.is_full and not handle.calls:
            residency.use_sharded(handle)
    if context.entered is None and context.tasks.keys() <= context.dead:
        for handle in context.handles:
            # The dead backward has not reached this unit, which was prefetched or
            # unsharded by the user.
            if handle.is_full and not handle.calls:
                residency.use_sharded(handle)


def reset_failed_graph_tasks(context: RuntimeContext) -> None:
    """Reset the units of graph tasks that raised; drop gradients not yet reduced."""
    # The hooks that close the ranges of these graph tasks will not run.
    end_all_ranges(context)
    dead, context.dead = context.dead, set()
    context.filling.clear()
    for log in context.backward_logs:
        log.drop()
    drop_reduction(context)
    for task in dead:
        for state in context.tasks.pop(task, ()):
            handle = state.handle
            if handle.backward.task == task:
                reset_backward(handle)
                drop_unreduced_grads(context, handle)
                reshard(context, handle)
            # The end of the graph task had begun when a hook of the user raised.
            elif handle.backward.task == NO_TASK:
                drop_unreduced_grads(context, handle)


def reset_backward(handle: FlatParamHandle) -> None:
    """Reset the backward counters and remove the unit from its graph task."""
    handle.backward = NO_BACKWARD
    handle.phase = Phase.IDLE


def finish_task(context: RuntimeContext, task: int) -> None:
    """Finish a graph task: reduce and reshard the units that no hook has finished."""
    if context.filling and len(context.tasks) == 1:
        for order in tuple(context.filling):
            order.issue_until(context, -1)
        context.filling.clear()
    # Gradients are enabled inside a backward only with ``create_graph``.
    retained = torch.is_grad_enabled()
    _finish_reached_units(context, task, retained=retained)
    # A nested graph task (a reentrant checkpoint) ends here; the end of the outermost
    # graph task does the rest.
    if not context.tasks:
        _finish_other_units(context, retained=retained)
        if root_of(context).settings.is_last_backward:
            finish_reduction(context)
            if context.offload:
                finish_d2h_grad_copies(context)
            if FLAT_PARAMS:
                flats = [h.writes.flat_parameters for h in context.handles]
                move_own_gradients(FLAT_PARAMS[id(p)] for each in flats for p in each)
        free_oldest(context, keep=0)
        for log in context.backward_logs:
            log.end()


def _finish_reached_units(
    context: RuntimeContext, task: int, *, retained: bool
) -> None:
    """Reduce and reshard the units of a graph task; ``retained``: leave them full."""
    late = []
    for state in context.tasks.pop(task, ()):
        handle = state.handle
        # A unit whose inputs need no gradient ends with the graph task.
        if OPEN:
            end_range("backward", context, handle.full_fqn)
        if handle.backward.task != task:
            continue
        # ``reset_backward``, inlined: a call per unit.
        handle.backward = NO_BACKWARD
        handle.phase = IDLE
        if handle.reduction.due:
            handle.reduction.due = has_arrived(handle)
            for region in handle.layout.trainable:
                region.reduce.progress = None
            if handle.reduction.due and state.settings.sync_gradients:
                late.append(handle)
        if handle.calls:
            # This backward ran inside a forward of the unit, which still reads the
            # parameters.
            handle.phase = Phase.FORWARD
            continue
        reshards = state.settings.reshard_after_backward
        # Usually the last ``input_done`` has resharded the unit.
        if (
            retained
            or handle.kept_for_backward
            or not reshards
            or handle.residency is not SHARDED
        ):
            end_use(context, handle, reshards, kept=retained)
    # Behind all reshards: the reduce buffers can take the memory of the parameters.
    if late and not context.tasks:
        free_oldest(context, keep=0)
    for handle in late:
        phase, handle.phase = handle.phase, Phase.BACKWARD_POST
        try:
            reduce_gradients(context, handle)
        finally:
            handle.phase = phase


def _finish_other_units(context: RuntimeContext, *, retained: bool) -> None:
    """Reduce gradients that earlier backwards left, and reshard unreached units."""
    for state in root_of(context)._root_states:
        handle = state.handle
        reduction = handle.reduction
        if (
            reduction.due or (reduction.held is not None and handle.rule.all_reduce)
        ) and state.settings.sync_gradients:
            # The gradients arrived under ``no_sync``, or wait for the all-reduce over
            # the replicate group, and this backward has not reached the unit.
            reduce_gradients(context, handle)
        reshards = state.settings.reshard_after_backward
        if (
            not retained
            and context.entered is None
            and (
                handle.kept_for_backward
                or not reshards
                or handle.residency is not SHARDED
            )
        ):
            end_use(context, handle, reshards, kept=False)
    context.prefetched.clear()


def grad_fns_of(tensors: Iterable[torch.Tensor], since: int) -> list[Any]:
    """Return the nodes, each once, at which backward may enter through ``tensors``."""
    found: dict[int, Any] = {}
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:
            continue
        # If the caller changes a view in place, either the node of the view or the node
        # of the base stays in the graph, so hook both; an older base is no part of it.
        found[id(node)] = node
        if tensor._base is not None:
            base = tensor._base.grad_fn
            if base is not None and base._sequence_nr() >= since:
                found[id(base)] = base
    return list(found.values())
