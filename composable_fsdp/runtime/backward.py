"""Backward of a unit: the hooks of outputs, full parameters and aliased inputs.

``pre_backward`` runs at the node of an output and unshards the unit. Two events then
drive the unit, and ``graph_task`` ends the units that saw only a part of them:

* *gradients complete*: the post-accumulate-grad hook of each full parameter keeps the
  gradient as autograd made the tensor, and decrements ``pending``, the number of
  parameters that this graph task will reach. At 0 the unit may reduce.
* *parameters no longer needed*: ``input_done`` has run for each input that requires
  grad. With complete gradients the unit reshards.

``Tensor._post_accumulate_grad_hooks`` is private (also used in ``user_hooks``,
``reduce`` and ``engine``), checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm.ranges import OPEN, end_range
from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import NO_TASK, RETAINED, FlatParamHandle, FullForm
from composable_fsdp.flat.param_form import ParamForm
from composable_fsdp.flat.precision import switch_form
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.flat.residency import NOT_GATHERED
from composable_fsdp.phases import BACKWARD_POST, illegal_move
from composable_fsdp.runtime.earlier_forms import (
    take_earlier_form,
    through_earlier_forward,
)
from composable_fsdp.runtime.graph_task import (
    begin_unit_backward,
    current_task,
    join_unannounced,
    reset_failed_graph_tasks,
    will_run,
)
from composable_fsdp.runtime.leaf_streams import make_nodes
from composable_fsdp.runtime.reduce import (
    copy_grads_to_reduce_buffers,
    expect_gradients,
    reduce_gradients,
    unshard_in_backward,
)
from composable_fsdp.runtime.unshard import (
    keep_full,
    prefetch_backward,
    prefetch_listed,
    release,
    reshard,
    wait_for_freed_memory,
    wait_unsharded,
)
from composable_fsdp.tree.state import ForwardRecord, RuntimeContext, _FSDPState

FSDP_HOOK_KEY = -1
"""Key of our hook in the hook dicts of a full parameter and of a module's forward."""


class GradientOrder(ForwardRecord):
    """The default: a unit reduces as soon as its gradients are complete."""

    __slots__ = ()

    reduce = staticmethod(reduce_gradients)
    prefetch = staticmethod(prefetch_backward)

    def restore_form(self, state: _FSDPState, form: FullForm) -> None:
        """Make ``form`` current, as ``select_form``."""
        select_form(state, form, self)


class UnitForward:
    """One forward of a unit, for the backward that may follow.

    Hooks of the autograd graph hold this object. The object must not hold a node of the
    graph after the forward: the reference cycle would keep the activations alive.
    """

    __slots__ = (
        "aliased",
        "aliases",
        "begin",
        "form",
        "held",
        "index",
        "inputs",
        "since",
        "state",
        "tape",
        "task",
        "waiting",
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
        self.begin = tape.count
        self.index = self.since = -1
        """``index``: position of this use in ``tape.uses``; -1 in a recomputed
        forward. ``begin``: number of uses that were recorded before the forward began.
        ``since``: sequence number of the next autograd node at the start."""
        self.task = NO_TASK
        """The graph task whose pre-backward has run for this call."""
        self.waiting = 0
        """Aliases whose ``input_done`` has not run yet in this graph task."""
        self.form = state.handle.form
        """The full form of the unit at the time of the forward: the graph holds the
        full leaves of ``form``."""

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
        # ``reached`` and not ``self.index``: units inside this unit have run since, so
        # the next unit is the one before the earliest use that backward has reached.
        if (
            handle.layout.plan.options.backward_prefetch
            is BackwardPrefetch.BACKWARD_POST
            and tape.reached > 0
            and not state.ahead_in_backward
        ):
            tape.prefetch(context, tape, tape.reached)
        # The reduce-scatter is issued after the prefetch: a backend runs collectives in
        # order. The next unit waits for the all-gather, whereas no compute waits for
        # this reduction until the next reduction is due.
        if through and handle.reduction.due and state.settings.sync_gradients:
            tape.reduce(context, handle)


def pre_backward(call: UnitForward, aliases: tuple[Any, ...], _: object = None) -> None:
    """Hook of the node of an output: unshard the unit and expect gradients.

    Runs once per forward call and graph task, whichever output comes first.

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
    call.waiting = sum(map(will_run, aliases)) if aliases else 1
    state, tape = call.state, call.tape
    handle, context = state.handle, state.context
    assert context is not None
    if handle.form is not call.form:
        tape.restore_form(state, call.form)
    if handle.backward.task != task:
        begin_unit_backward(context, state, task)
    mode = handle.layout.plan.options.backward_prefetch
    # A call with an alias ends by ``input_done``, which then reshards and reduces; a
    # call without an alias ends with the graph task.
    if call.aliased:
        handle.backward.expected_calls += 1
    else:
        # Read if another unit needs the slot of an arena (``runtime.slots``).
        handle.backward.endless = True
    if tape not in handle.backward.tapes:
        # First call of this forward record in this graph task: add the open calls of
        # the whole record.
        handle.backward.tapes = (*handle.backward.tapes, tape)
        handle.backward.open_calls += tape.open_calls.get(handle, 0)
    tape.reach(context, handle, call.index)
    if handle.residency in NOT_GATHERED:
        unshard_in_backward(context, handle)
    wait_unsharded(handle)
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
    if handle.form is not call.form:
        select_form(state, call.form, call.tape)
    if handle.backward.task != task:
        begin_unit_backward(context, state, task)
    # The last node of the second backward is not known, so no hook counts down; the end
    # of the graph task reshards the unit.
    if handle.backward.open_calls < RETAINED:
        handle.backward.open_calls += RETAINED
    if handle.residency in NOT_GATHERED:
        unshard_in_backward(context, handle)
    wait_unsharded(handle)


def select_form(state: _FSDPState, form: FullForm, tape: ForwardRecord) -> None:
    """Make ``form``, whose full leaves a graph holds, the current form of the unit.

    ``form`` is of this or an earlier layout; ``tape`` records its forward.

    Raises: PhaseError, as ``take_earlier_form``. Collective: as ``take_earlier_form``.
    """
    context = state.context
    assert context is not None
    if form is state.handle.other_form:
        select_full_form(context, state, wide=form.full_precision)
    else:
        take_earlier_form(state, form, tape)
        install_grad_hooks(state)


def install_grad_hooks(state: _FSDPState) -> None:
    """Register the hooks on the full parameters of the current form, once per form."""
    handle = state.handle
    # An AccumulateGrad node exists only with gradients enabled; leaving inference mode
    # enables gradients.
    grads = torch.is_grad_enabled()
    with nullcontext() if grads else torch.inference_mode(False):
        for region in handle.layout.trainable:
            # Weak references: the garbage collector does not look into the hooks of a
            # tensor (torch 2.13), so a strong reference would keep the model and the
            # shards alive for ever.
            region.reduce.owner, link = weakref.ref(state), weakref.ref(region)
            for index, leaf in enumerate(region.full.leaves):
                # The effect of ``register_post_accumulate_grad_hook`` without the
                # checks and the handle, which took most of the time. Torch numbers
                # hooks from 0 up, so the key -1 is free.
                leaf._post_accumulate_grad_hooks = hooks = OrderedDict()
                hooks[FSDP_HOOK_KEY] = MethodType(_make_grad_hook(index), link)
        if handle.layout.forms:
            _hook_forms(handle)
        make_nodes(handle)


def _hook_forms(handle: FlatParamHandle) -> None:
    """Let the hooks of parameters with a form take plain gradients from the form."""
    for region in handle.layout.trainable:
        link = weakref.ref(region)
        for index, (slot, leaf) in enumerate(
            zip(region.layout.parameters, region.full.leaves, strict=True)
        ):
            form = handle.layout.forms.get(slot.index)
            if form is not None:
                # Not through the cache, which would keep the mesh of the form alive.
                arrive = _make_grad_hook.__wrapped__(index, form)
                hooks: Any = leaf._post_accumulate_grad_hooks
                hooks[FSDP_HOOK_KEY] = MethodType(arrive, link)


def select_full_form(context: RuntimeContext, state: _FSDPState, *, wide: bool) -> None:
    """Switch the unit to the full form in the parameters' own or the compute dtype.

    A unit that is unsharded in the other form is resharded, and that full buffer is
    freed.
    """
    handle = state.handle
    if handle.form.full_precision is wide:
        return
    release(context, handle)
    if switch_form(handle):
        install_grad_hooks(state)


# A function per index serves all units: a hook is then a single object, the bound
# method of a weak reference to the region.
@cache
def _make_grad_hook(
    index: int, form: ParamForm | None = None
) -> Callable[[weakref.ref[TrainableRegion], Tensor], None]:
    """Return the post-accumulate-grad hook of the full parameter ``index`` of a region.

    The first gradient of a parameter since the last reduction is kept, and is copied to
    the reduce buffer together with the other gradients of the unit. Later gradients are
    added in the reduce buffer, in the reduce dtype. Plain parameters have no ``form``.
    """

    def arrive(link: weakref.ref[TrainableRegion], leaf: Tensor) -> None:
        region = link()
        unit: _FSDPState | None = None if region is None else region.reduce.owner()
        if region is None or unit is None:
            leaf.grad = None
            shape = tuple(leaf.shape)
            raise PhaseError(through_earlier_forward(f"a parameter of shape {shape}"))
        reduce = region.reduce
        handle, task = unit.handle, current_task()
        gradient = leaf.grad
        # The gradient is None if a custom Function returned none; the hook is still
        # counted. A parameter that was frozen after the forward gets no gradient, as in
        # plain torch.
        if gradient is not None and not region.leaves[index].requires_grad:
            leaf.grad = gradient = None
        if gradient is not None:
            leaf.grad = None
            if gradient.requires_grad:  # with create_graph
                gradient = gradient.detach()
            if form is not None:
                gradient = form.gradient(gradient)
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
        # A gradient of another graph task (a reentrant checkpoint inside the unit) is
        # only accumulated.
        progress = handle.backward
        if progress.task == task:
            progress.pending -= 1
            if progress.pending == 0:
                _on_all_gradients(unit, handle)

    return arrive


def _on_unexpected_grad(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Have the end of the graph task reduce a gradient that no pre-backward announced.

    Gradients of an earlier backward may wait (``no_sync``), and the unit may be part of
    an outer graph task.

    Raises: PhaseError, if the unit is sharded, because the operations before this
        gradient may have read parameters that are not valid.
    """
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
    expect_gradients(handle)
    if handle.backward.task == NO_TASK:
        join_unannounced(context, state, current_task())


def _on_all_gradients(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard and reduce the unit, unless an open forward call will do so later."""
    context = state.context
    assert context is not None
    progress = handle.backward
    # If every open call has an alias, the last ``input_done`` reshards and reduces.
    if progress.expected_calls and progress.expected_calls == progress.open_calls:
        return
    if progress.open_calls == 0:
        # Reshard first: the reduce buffer can then take the memory of the full
        # parameters.
        reshard_after_backward(state, handle)
    if state.settings.sync_gradients:
        for region in handle.layout.trainable:
            if progress.open_calls and 0 in region.reduce.arrived:
                # Missing gradients may still arrive without a pre-backward, from a
                # reentrant checkpoint inside the unit. The last ``input_done`` comes
                # after the checkpoint and reduces once.
                break
        else:
            reduce = progress.tapes[0].reduce if progress.tapes else reduce_gradients
            reduce(context, handle)


def reshard_after_backward(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard the unit after backward, or keep the unit full if so configured.

    Inside a forward of the unit nothing happens: the end of that forward decides.
    """
    context = state.context
    assert context is not None
    if handle.running.calls:
        return
    if BACKWARD_POST not in handle.phase.followers:
        raise illegal_move(handle.name, handle.phase, BACKWARD_POST)
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
