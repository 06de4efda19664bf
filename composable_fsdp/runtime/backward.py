"""Backward of a unit: where it enters, what it waits for, and where it ends.

``pre_backward`` at the outputs unshards; ``arrive`` takes a gradient; ``input_done``,
at the last input's alias, reshards and reduces. ``graph_task`` ends the units that saw
only a part of these.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm.operations import OPEN, end_range
from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.gradients import has_arrived
from composable_fsdp.flat.handle import (
    NO_TASK,
    BackwardProgress,
    FlatParamHandle,
    FullForm,
)
from composable_fsdp.flat.param_form import ParamForm
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.flat.residency import NOT_GATHERED
from composable_fsdp.phases import BACKWARD_POST
from composable_fsdp.runtime.graph_task import (
    FSDP_HOOK_KEY,
    awaits_gradients,
    begin_unit_backward,
    current_task,
    earlier_forward,
    grad_fns_of,
    register_task_end,
    reset_failed_graph_tasks,
    will_run,
)
from composable_fsdp.runtime.reduce import copy_grads_to_reduce_buffers
from composable_fsdp.runtime.unshard import (
    keep_full,
    prefetch_backward,
    prefetch_listed,
    reshard,
    unshard,
    wait_for_freed_memory,
    wait_unsharded,
)
from composable_fsdp.tree.moments import PASSAGES
from composable_fsdp.tree.state import StepOrder, _FSDPState

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PRE, _POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the sequence number of the next node of this thread."""


@dataclass(slots=True, eq=False)
class UnitForward:
    """One forward of a unit; hooks of the autograd graph hold it until backward."""

    state: _FSDPState
    module: nn.Module
    order: StepOrder
    passage: Any
    """How values enter and leave this forward (``runtime.forward.Passage``)."""
    has_graph: bool
    begin: int
    """Number of uses that were recorded before the forward began."""
    form: FullForm
    """The full form of the unit at the time: the graph holds the full leaves of it."""
    given: Any = None
    """What the passage has to give back to the caller; None after the forward."""
    # Emptied at the end of the forward: a graph node that is held from the hook of one
    # would be a cycle, which keeps the activations alive.
    aliases: tuple[Any, ...] = ()
    entry: tuple[Any, UnitForward] | None = None
    """``RuntimeContext.tail``, if an input came from there; emptied alike."""
    # The inner of two first, as their aliases end: whether a tensor has hooks, which
    # keep the alias, may differ between ranks, and the order of reductions must not.
    followers: tuple[UnitForward, ...] = ()
    """Calls that took the output of this one as it is: their backward is over where
    that of this call begins."""
    aliased: bool = False
    inputs: tuple[tuple[Tensor, int], ...] = ()
    """Inputs with their versions at the start; emptied alike."""
    index: int = -1
    """Position of this use in ``order.uses``; -1 in a recomputed forward."""
    task: int = NO_TASK
    """The graph task whose pre-backward has run for this call."""
    waiting: int = 0
    """Aliases whose ``input_done`` has not run yet in this graph task."""

    def forget_inputs(self) -> None:
        """Drop the references to the inputs of a forward that has raised."""
        self.aliases, self.inputs, self.entry = (), (), None
        if self.given is not None:
            self.given.give_back()
            self.given = None

    def alias(self, tensor: Tensor) -> Tensor:
        """Return an alias, with ``input_done``, of an input that requires grad."""
        if not tensor.requires_grad:
            if not tensor.is_inference():
                # Tensors of inference mode have no version counter.
                self.inputs += ((tensor, tensor._version),)
            return tensor
        context = self.state.context
        assert context is not None
        tail, streams = context.tail, context.streams
        # The output of the unit before as it is: the hook there ends this call, too,
        # behind hooks of the user on the tensor and all its users. Not a call on a
        # stream of its own, behind which that of the hook need not be (``reshard``).
        if (
            tail is not None
            and tail[0] is tensor.grad_fn
            and tensor.output_nr == 0
            and self.order is context.order
            and not tensor._backward_hooks
            and (streams.host_waits or streams.current() == streams.compute)
        ):
            self.entry = tail
            self.inputs += ((tensor, tensor._version),)
            return tensor
        # On an alias (``view_as``) of this call alone: a hook on the input's own node
        # would run only after all users of the input.
        view = tensor.view_as(tensor)
        node = view.grad_fn
        # Inside a transform of torch.func, a captured tensor may have no graph.
        if node is not None:
            node.register_hook(self.input_done)
            self.aliases += (node,)
        self.inputs += ((view, view._version),)
        return view

    def input_done(self, _: object, gradients: tuple[Any, ...]) -> None:
        """Hook of the node of each input: after the last, reshard and reduce."""
        if self.state.handle.backward.retained:
            _hook_for_next_backward(self, gradients)
        # The engine runs ready nodes by sequence number, highest (youngest) first. The
        # alias is the oldest node of this forward, so all other nodes of the forward
        # have run.
        self.waiting -= 1
        if self.waiting:
            return
        state, order = self.state, self.order
        handle, context = state.handle, state.context
        assert context is not None
        progress = handle.backward
        if progress.task != current_task():
            return
        progress.open_calls -= 1
        # Complete gradients alone do not allow a reshard: the last operation that reads
        # the parameters may compute the gradient of an input. Reshard before the
        # reduction, so that the reduce buffer can take the memory of the parameters.
        reduces = False
        waits = progress.open_calls or (progress.pending and awaits_gradients(handle))
        if not waits:
            reshard_after_backward(state, handle)
            # Of a unit that stays full until the graph task ends: if compute is left
            # that may hide the reduction.
            if order.reached or not progress.retained:
                reduces = state.settings.sync_gradients and has_arrived(handle)
        progress.expected_calls -= 1
        # ``reached`` and not ``self.index``: units inside this unit have run since, so
        # the next unit is the one before the earliest use that backward has reached.
        if (
            handle.layout.plan.options.backward_prefetch is _POST
            and order.reached > 0
            and not state.ahead_in_backward
        ):
            if reduces:
                # Before the all-gather, which the copy would wait for (``reduce``).
                copy_grads_to_reduce_buffers(context, handle)
            order.prefetch(context, order, order.reached)
        # The reduce-scatter is issued after the prefetch: a backend runs collectives in
        # order. The next unit waits for the all-gather, whereas no compute waits for
        # this reduction until the next reduction is due.
        if reduces:
            order.reduce(context, handle)


def hook_outputs(call: UnitForward, tensors: list[Tensor], *, adds: bool) -> bool:
    """Register ``pre_backward`` on the outputs; return if a backward can come."""
    aliases, entry = call.aliases, call.entry
    since = -1 if entry is None else entry[0]._sequence_nr()
    # ``forget_inputs``, inlined: a call per forward.
    call.aliases, call.inputs, call.entry = (), (), None
    nodes = _output_nodes(tensors, aliases, since)
    if not nodes:
        return False
    older: list[Any] = []
    if entry is not None and (nodes[1:] or nodes[0]._sequence_nr() <= since):
        older = _hook_older(call, nodes, since)
        nodes = [node for node in nodes if node not in older]
        tensors = [each for each in tensors if each.grad_fn not in older]
    enters = None
    if entry is not None and nodes:
        enters = entry[0]
        aliases = (enters, *aliases)
        entry[1].followers += (call,)
    call.aliased = bool(aliases)
    # A single alias is not counted: it runs behind all other nodes of the forward.
    counted = _counted(aliases, nodes) if aliases[1:] else ()
    hook = partial(pre_backward, call, counted, enters)
    for node in nodes:
        node.register_prehook(hook)
    for tensor in tensors:
        if tensor._backward_hooks or tensor._base is not None:
            _put_first(hook, tensor)
    if adds:
        _add_use(call, [*nodes, *older])
    # Without an alias no ``input_done`` counts this call down, as intended: the
    # gradient may flow to an attribute or a closure until the graph task ends.
    calls, handle = call.order.graphs, call.state.handle
    calls[handle] = calls.get(handle, 0) + 1
    return True


def _output_nodes(
    tensors: list[Tensor], aliases: tuple[Any, ...], since: int
) -> list[Any]:
    """Return the nodes at which backward enters the call, each once."""
    if len(tensors) == 1 and tensors[0]._base is None:
        node = tensors[0].grad_fn
        nodes = [] if node is None else [node]
    else:
        nodes = grad_fns_of(tensors, max(first_number(aliases), since + 1))
    if not nodes and torch._C._functorch.peek_interpreter_stack() is not None:
        inside = PASSAGES["full"].below_transforms(tensors)
        nodes = grad_fns_of(inside, first_number(aliases))
    return nodes


def _hook_older(call: UnitForward, nodes: list[Any], since: int) -> list[Any]:
    """Hook the outputs of before the unit; return their nodes."""
    # They may lead to its input, or are its input: a hook that held the node of the
    # input would be a cycle.
    older = [node for node in nodes if node._sequence_nr() <= since]
    for node in older:
        node.register_prehook(partial(pre_backward, call, (), None))
    return older


def _counted(aliases: tuple[Any, ...], nodes: list[Any]) -> tuple[Any, ...]:
    """Return the aliases that pre-backward counts, if several."""
    # A hook must not hold the node that the hook is registered on (an alias that is
    # also an output): the reference cycle would keep the graph alive.
    others = [a for a in aliases if all(a is not node for node in nodes)]
    return tuple(others) if len(others) > 1 else ()


def _add_use(call: UnitForward, nodes: list[Any]) -> None:
    """Add the call to the order of its forward, and let the next call follow it."""
    call.index = call.order.add(call.state, call.begin)
    context = call.state.context
    assert context is not None
    # The hook of a unit inside, on the same node, runs first.
    if context.tail is None or context.tail[0] is not nodes[0]:
        context.tail = None if nodes[1:] else (nodes[0], call)


def first_number(aliases: tuple[Any, ...]) -> int:
    """Return the first sequence number of a forward; 0 if it has no alias."""
    return min([alias._sequence_nr() for alias in aliases], default=0)


def _put_first(hook: Any, tensor: Tensor) -> None:
    """Have ``hook`` run before the user's hooks on an output, or on its base."""
    # Tensor hooks run before node hooks, in the order of registration, and a user's
    # hook may read the parameters.
    for each in (tensor, tensor._base):
        if each is not None and each._backward_hooks:
            hooks = dict(each._backward_hooks)
            each._backward_hooks.clear()
            each._backward_hooks.update({FSDP_HOOK_KEY: hook, **hooks})


def pre_backward(
    call: UnitForward, aliases: tuple[Any, ...], entry: Any, _: object = None
) -> None:
    """End the next calls; unshard and expect gradients, once per call and graph task.

    Raises: DesyncError, PhaseError. Collective: all-gathers of this and the next unit.
    """
    task = current_task()
    if call.task == task:
        return
    call.task = task
    for follower in call.followers:
        if follower.task == task:
            follower.input_done(None, ())
    # A single alias is not looked up: if the alias does not run, nothing counts down.
    # Of several aliases, count only the aliases that this graph task will run.
    call.waiting = sum(map(will_run, aliases)) if aliases else 1
    state, order = call.state, call.order
    handle, context = state.handle, state.context
    assert context is not None
    if handle.form is not call.form:
        raise earlier_forward(f"unit {state.name}")
    if handle.backward.task != task:
        begin_unit_backward(context, state, task)
    progress = handle.backward
    # A call with an alias ends by ``input_done``, which then reshards and reduces; a
    # call without an alias ends with the graph task.
    # Both are read if another unit needs the slot of an arena (``features.arena``).
    progress.expected_calls += call.aliased
    progress.endless |= not call.aliased
    if progress.retained:
        _await_next_backward(call, entry)
    if order not in progress.orders:
        # First call of this order in this graph task: add the open calls of
        # the whole forward.
        progress.orders = (*progress.orders, order)
        progress.open_calls += order.graphs.get(handle, 0)
    order.reach(context, handle, call.index)
    if handle.residency in NOT_GATHERED:
        unshard(context, handle)
    wait_unsharded(handle)
    if order.task != task:
        order.task, order.reached = task, call.index
    elif call.index < order.reached:
        order.reached = call.index
    if state.ahead_in_backward:
        prefetch_listed(context, state, state.ahead_in_backward)
    elif order.reached > 0 and handle.layout.plan.options.backward_prefetch is _PRE:
        prefetch_backward(context, order, order.reached)


def _await_next_backward(call: UnitForward, entry: Any) -> None:
    """Have node ``entry``, if any, call ``_hook_for_next_backward``."""
    if entry is not None:
        # Of an input that ``autograd.grad`` was asked for only tensor hooks run.
        probe = torch.empty(0, device="cpu")
        then = partial(_hook_for_next_backward, call)
        probe._backward_hooks = OrderedDict({FSDP_HOOK_KEY: then})
        entry._register_hook_dict(probe)


def _hook_for_next_backward(call: UnitForward, found: Any) -> None:
    """Register a hook that unshards the unit in a backward of this backward."""
    # It enters the graph, which reads the parameters, at the inputs' gradients.
    hook = partial(pre_next_backward, call)
    for gradient in found if type(found) is tuple else (found,):
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(hook)


def pre_next_backward(call: UnitForward, _: object = None) -> None:
    """Hook of a gradient's node: unshard the unit until this graph task ends."""
    task, state = current_task(), call.state
    handle, context = state.handle, state.context
    assert context is not None
    if handle.form is not call.form:
        raise earlier_forward(f"unit {state.name}")
    if handle.backward.task != task:
        begin_unit_backward(context, state, task)
    # The last node of the second backward is not known, so no hook counts down; the end
    # of the graph task reshards the unit.
    handle.backward.retained = True
    if handle.residency in NOT_GATHERED:
        unshard(context, handle)
    wait_unsharded(handle)


# A function per index serves all units: a hook is then a single object, the bound
# method of a weak reference to the region.
@cache
def make_grad_hook(
    index: int, param_form: ParamForm | None = None
) -> Callable[[weakref.ref[TrainableRegion], Tensor], None]:
    """Return the post-accumulate-grad hook of full parameter ``index`` of a region."""

    def arrive(link: weakref.ref[TrainableRegion], leaf: Tensor) -> None:
        region, gradient = link(), leaf.grad
        if region is None or gradient is None:
            _arrive(region, index, leaf, param_form)
            return
        reduce = region.reduce
        progress = reduce.progress
        if (
            progress is None
            or reduce.arrived[index]
            or not region.leaves[index].requires_grad
        ):
            del gradient
            _arrive(region, index, leaf, param_form)
            return
        leaf.grad = None
        reduce.waiting[index] = gradient
        reduce.arrived[index] = 1
        progress.pending -= 1
        if not progress.pending and progress.endless:
            del gradient  # let the reduction free the gradient
            _reduce_ahead(reduce.owner(), progress)

    return arrive


def _arrive(
    region: TrainableRegion | None,
    index: int,
    leaf: Tensor,
    param_form: ParamForm | None,
) -> None:
    """Take a gradient that no pre-backward of the graph task announced as usual."""
    unit: _FSDPState | None = None if region is None else region.reduce.owner()
    gradient, leaf.grad = leaf.grad, None
    if region is None or unit is None:
        raise earlier_forward(f"a parameter of shape {tuple(leaf.shape)}")
    reduce, handle, task = region.reduce, unit.handle, current_task()
    # None if a custom Function returned none. A parameter that was frozen after the
    # forward gets no gradient, as in plain torch.
    if gradient is not None and region.leaves[index].requires_grad:
        if gradient.requires_grad:  # with create_graph
            gradient = gradient.detach()
        if param_form is not None:
            gradient = param_form.gradient(gradient)
        if handle.backward.task != task or not handle.reduction.due:
            _on_unexpected_grad(unit, handle)
        if reduce.arrived[index]:
            assert unit.context is not None
            copy_grads_to_reduce_buffers(unit.context, handle)
            reduce.views[index].add_(gradient)
        else:
            reduce.waiting[index] = gradient
            reduce.arrived[index] = 1
    del gradient  # let the reduction free the gradient
    progress = handle.backward
    if progress.task == task:
        progress.pending -= 1
        if not progress.pending and progress.endless:
            _reduce_ahead(unit, progress)


def _reduce_ahead(state: _FSDPState, progress: BackwardProgress) -> None:
    """Reduce a unit without an alias, if compute is left that may hide this."""
    if state.settings.sync_gradients and any(o.reached for o in progress.orders):
        assert state.context is not None
        progress.orders[0].reduce(state.context, state.handle)


def _on_unexpected_grad(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Have the end of the graph task reduce a gradient that was not announced."""
    context = state.context
    assert context is not None
    if handle.backward.task in context.dead:
        reset_failed_graph_tasks(context)
    if handle.form.readable is None:
        raise PhaseError(
            f"Backward reached a parameter of unit {handle.name} while the unit is "
            "sharded: through a tensor that its forward did not return. Return the "
            "tensor from the forward, or keep it on an attribute of the unit's module "
            "from the first forward on."
        )
    handle.reduction.due = True
    if handle.backward.task == NO_TASK:
        task = current_task()
        register_task_end(context, state, task)
        handle.backward = BackwardProgress(task)


def reshard_after_backward(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard the unit after backward, or keep the unit full if so configured."""
    context = state.context
    assert context is not None
    if handle.calls or handle.backward.retained:
        return
    handle.phase = BACKWARD_POST
    if OPEN:
        end_range("backward", context, handle.full_fqn)
    if state.settings.reshard_after_backward:
        reshard(context, handle)
        if context.retiring:
            # With BACKWARD_PRE the next all-gather is for the unit after the next, and
            # is issued after this unit's reduction, so the all-gather waits for this
            # unit in any case. Freeing now costs no overlap.
            wait_for_freed_memory(context, handle)
    else:
        keep_full(context, handle)
