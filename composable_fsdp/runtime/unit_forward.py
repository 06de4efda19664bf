"""One forward of a unit, and the hooks of its graph: where backward enters and ends.

::

    UnitForward.alias        an input that requires grad becomes an alias of this call
    hook_outputs             at the end of the forward: ``pre_backward`` at the outputs
    pre_backward             backward enters the unit: unshard
    UnitForward.input_done   the last alias: the parameters are no longer needed
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.flat.handle import NO_TASK, RETAINED, FullForm
from composable_fsdp.flat.residency import NOT_GATHERED
from composable_fsdp.runtime.backward import (
    FSDP_HOOK_KEY,
    reshard_after_backward,
    select_form,
)
from composable_fsdp.runtime.container_copies import ContainerCopies
from composable_fsdp.runtime.escaped_tensors import (
    below_transforms,
    first_number,
    grad_fns_of,
)
from composable_fsdp.runtime.graph_task import (
    begin_unit_backward,
    current_task,
    will_run,
)
from composable_fsdp.runtime.reduce import unshard_in_backward
from composable_fsdp.runtime.unshard import (
    prefetch_backward,
    prefetch_listed,
    wait_unsharded,
)
from composable_fsdp.tree.state import ForwardRecord, _FSDPState


@dataclass(slots=True, eq=False)
class UnitForward:
    """One forward of a unit, for its end and for the backward that may follow.

    Hooks of the autograd graph hold this object. The object must not hold a node of the
    graph after the forward: the reference cycle would keep the activations alive.
    """

    state: _FSDPState
    module: nn.Module
    tape: ForwardRecord
    passage: Any
    """How values enter and leave this forward (``runtime.passage``)."""
    taped: bool
    """Whether the forward makes a graph of its own."""
    begin: int
    """Number of uses that were recorded before the forward began."""
    form: FullForm
    """The full form of the unit at the time: the graph holds the full leaves of it."""
    aliases: tuple[Any, ...] = ()
    """Nodes of the aliases of the inputs; emptied at the end of the forward."""
    aliased: bool = False
    """Whether the call had an alias, so that ``input_done`` will run."""
    inputs: tuple[tuple[Tensor, int], ...] = ()
    """Inputs with their versions at the start; emptied at the end of the forward."""
    held: object = None
    """The arguments, if they include containers; None after the forward."""
    copies: ContainerCopies | None = None
    """The copies of the caller's containers and tensors that the forward gets."""
    index: int = -1
    """Position of this use in ``tape.uses``; -1 in a recomputed forward."""
    since: int = -1
    """Sequence number of the next autograd node at the start."""
    task: int = NO_TASK
    """The graph task whose pre-backward has run for this call."""
    waiting: int = 0
    """Aliases whose ``input_done`` has not run yet in this graph task."""

    def forget_inputs(self) -> None:
        """Drop the references to the inputs of a forward that has ended or raised."""
        self.aliases, self.inputs = (), ()
        self.held = self.copies = None

    def hold(self, given: object) -> None:
        """Keep arguments with containers until the end of the forward."""
        self.held = given

    def alias(self, tensor: Tensor) -> Tensor:
        """Return an alias of an input that requires grad, with the hook ``input_done``.

        Other inputs stay, and their versions are noted.
        """
        if not tensor.requires_grad:
            if not tensor.is_inference():
                # Tensors of inference mode have no version counter.
                self.inputs += ((tensor, tensor._version),)
            return tensor
        # On an alias (``view_as``) of this call alone: a hook on the input's own node
        # would run only after all users of the input.
        view = tensor.view_as(tensor)
        node = view.grad_fn
        assert node is not None
        node.register_hook(self.input_done)
        self.aliases += (node,)
        self.inputs += ((view, view._version),)
        return view

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


def hook_outputs(call: UnitForward, tensors: list[Tensor], *, record: bool) -> bool:
    """Register ``pre_backward`` on the nodes of the outputs.

    Returns: False if no output has a node, so that no backward can reach this call.
    """
    aliases = call.aliases
    call.aliased = bool(aliases)
    # ``forget_inputs``, inlined: a call per forward.
    call.aliases, call.inputs, call.held = (), (), None
    if len(tensors) == 1 and tensors[0]._base is None:
        node = tensors[0].grad_fn
        nodes = [] if node is None else [node]
    else:
        nodes = grad_fns_of(tensors, first_number(aliases))
    if not nodes:
        nodes = grad_fns_of(below_transforms(tensors), first_number(aliases))
    if not nodes:
        return False
    if len(aliases) == 1:
        counted: tuple[Any, ...] = ()
    else:
        # A hook must not hold the node that the hook is registered on (an alias that is
        # also an output): the reference cycle would keep the graph alive.
        others = [a for a in aliases if all(a is not node for node in nodes)]
        counted = tuple(others) if len(others) > 1 else ()
    hook = partial(pre_backward, call, counted)
    for node in nodes:
        node.register_prehook(hook)
    for tensor in tensors:
        if tensor._backward_hooks or tensor._base is not None:
            _put_first(hook, tensor)
    if record:
        call.index = call.tape.record(call.state, call.begin)
    # Without an alias no ``input_done`` counts this call down, as intended: the
    # gradient may flow to an attribute or a closure until the graph task ends.
    calls, handle = call.tape.open_calls, call.state.handle
    calls[handle] = calls.get(handle, 0) + 1
    return True


def _put_first(hook: Any, tensor: Tensor) -> None:
    """Have ``hook`` run before the user's hooks on an output, or on its base."""
    # Tensor hooks run before node hooks, in the order of registration, and a user's
    # hook may read the parameters.
    for each in (tensor, tensor._base):
        if each is not None and each._backward_hooks:
            hooks = dict(each._backward_hooks)
            each._backward_hooks.clear()
            each._backward_hooks.update({FSDP_HOOK_KEY: hook, **hooks})


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
        # Read if another unit needs the slot of an arena (``features.arena``).
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
