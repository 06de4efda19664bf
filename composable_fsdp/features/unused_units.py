"""Parameters and units that only some ranks use: all ranks send the same in backward.

``CommonOrder`` goes through the uses of a forward in reverse, and issues at each, also
a skipped one, what other ranks issue there. Units below ``call_where`` are full
together, also on ranks that run nothing. The logs of their order are off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from copy import copy
from functools import partial, reduce
from itertools import chain
from operator import or_
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import operation_log
from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.gradients import has_arrived, zero_missing
from composable_fsdp.flat.handle import NO_LOGS, NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import NOT_GATHERED, SHARDED
from composable_fsdp.phases import BACKWARD_PRE, FORWARD, IDLE, Phase
from composable_fsdp.runtime import graph_task, unshard
from composable_fsdp.runtime.backward import UnitForward
from composable_fsdp.runtime.forward import end_unit_forward
from composable_fsdp.runtime.graph_task import (
    current_task,
    earlier_forward,
    grad_fns_of,
)
from composable_fsdp.runtime.recover import GradientOrder
from composable_fsdp.runtime.reduce import (
    copy_grads_to_reduce_buffers,
    reduce_gradients,
)
from composable_fsdp.tree.state import (
    OWNERS,
    RuntimeContext,
    StepOrder,
    _FSDPState,
    root_of,
)
from composable_fsdp.tree.traversal import inside_wrappers, require_module

_PLAIN = "expects all calls of its units in a forward to go by call_where alone."


class CommonOrder(StepOrder):
    """An order whose backward goes through all uses, in an order that ranks share."""

    __slots__ = ("accumulates", "begins", "next", "waiting")

    def __init__(self, mode: Hashable = ()) -> None:
        super().__init__(mode)
        self.begins: dict[_FSDPState, int] = {}
        """Per unit: the number of uses recorded when its first forward began."""
        # Progress of backward; set when backward reaches the forward of this order.
        self.next = 0
        """Index of the use that backward has reached last, from the end."""
        self.accumulates = False
        """Whether this backward accumulates gradients of parameters."""
        self.waiting: dict[_FSDPState, int] = {}
        """The entries of ``begins`` whose unit is not reduced yet."""

    def add(self, unit: _FSDPState, begin: int = 0) -> int:
        """Append a use whose forward began after ``begin`` uses; return its index."""
        # A unit that runs several times is reduced only before its earliest forward.
        self.begins[unit] = min(begin, self.begins.get(unit, begin))
        return super().add(unit, begin)

    recomputed = GradientOrder.recomputed

    def reach(
        self, context: RuntimeContext, handle: FlatParamHandle, index: int
    ) -> None:
        """Issue the collectives of all uses after ``index``, in reverse."""
        self.issue_until(context, index)

    def issue_until(self, context: RuntimeContext, index: int) -> None:
        """Issue the collectives of the uses after ``index``, last to first."""
        if self not in context.filling:
            finish_later_forwards(context)
            context.filling.append(self)
            self.next, self.waiting = self.count, dict(self.begins)
            # A backward of ``autograd.grad`` with respect to other tensors reduces
            # nothing: zeros would become gradients that the user did not ask for. All
            # ranks must therefore run the same kind of backward.
            self.accumulates = not graph_task.parameters_not_requested() or any(
                graph_task.will_run(node)
                for each in context.handles
                for node in each.form.accumulators
            )
        while self.next > index:
            self.next -= 1
            at = self.next
            # The engine runs younger nodes first, so when backward reaches a use before
            # the first forward of a unit began, the gradients of that unit are complete
            # or will never come.
            for state in [s for s, begin in self.waiting.items() if begin > at]:
                del self.waiting[state]
                _reduce_in_turn(context, state, accumulates=self.accumulates)
            super().reach(context, self.uses[at].handle, at)
            if at > index:
                _gather_in_turn(context, self, at)

    def reduce(self, context: RuntimeContext, handle: FlatParamHandle) -> None:
        """Do nothing: ``reach`` reduces the unit in its turn, equal on all ranks."""

    def prefetch(self, context: RuntimeContext, order: StepOrder, reached: int) -> None:
        """Do nothing: the end of a unit's backward is at another time on each rank."""


def finish_later_forwards(context: RuntimeContext) -> None:
    """Finish the backward of forwards that are later than the one reached now."""
    for order in tuple(context.filling):
        order.issue_until(context, -1)
        for state in dict.fromkeys(order.uses):
            _free_unused(context, state)


def _gather_in_turn(context: RuntimeContext, order: CommonOrder, at: int) -> None:
    """Unshard the unit of skipped use ``at``, and prefetch as in a normal backward."""
    state = order.uses[at]
    handle = state.handle
    if handle.residency in NOT_GATHERED:
        unshard.unshard(context, handle)
    # BACKWARD_POST has no point in time that is the same on all ranks, so only
    # BACKWARD_PRE and listed units are prefetched.
    pre = handle.layout.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    if state.ahead_in_backward:
        unshard.prefetch_listed(context, state, state.ahead_in_backward)
    elif pre and at > 0:
        unshard.prefetch_backward(context, order, at)


def _reduce_in_turn(
    context: RuntimeContext, state: _FSDPState, *, accumulates: bool
) -> None:
    """Reduce the unit in turn, with zeros for parameters without a gradient."""
    handle = state.handle
    expected = handle.rule.fill and handle.layout.trainable and accumulates
    if state.settings.sync_gradients and (expected or has_arrived(handle)):
        reduce_gradients(context, handle)
    if handle.backward.task == NO_TASK:
        # Backward has not reached the unit, so no other hook reshards the unit.
        _free_unused(context, state)


def _free_unused(context: RuntimeContext, state: _FSDPState) -> None:
    """Reshard the unit, or keep the unit full for the next forward if so configured."""
    handle = state.handle
    if handle.calls:
        # This backward runs inside a forward of the unit (``torch.func.vjp``), which
        # still reads the parameters.
        return
    if state.settings.reshard_after_backward:
        unshard.reshard(context, handle)
    elif handle.residency is not SHARDED:
        unshard.wait_unsharded(handle)
        unshard.keep_full(context, handle)


def call_where(module: nn.Module, used: bool, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` where ``used`` is true; the other ranks join what it sends.

    Every rank makes the call, at the same place of the forward. Gradients are averaged
    over all ranks, with zeros of those that do not run the module: those of the plain
    model over the union of the batches, if its loss is the mean of the ranks' losses.
    If a rank runs the module, all its trainable parameters get a gradient, else none.
    Its units are full together, from end to end of the call, in forward and backward.

    Args:
        module: A unit below the one that runs: ``fully_shard`` was given the module.
        used: Whether this rank runs it; equal in a tensor- or expert-parallel group.
        args, kwargs: Passed to the module.

    Returns: What the module returns; where ``used`` is false, a zero of shape () on the
        compute device. On every rank the loss must depend on it: add it to the loss.
    Collective: an all-gather of a byte per rank over the shard group, with gradients
        also over the replicate group; the host waits. If a rank runs the module, an
        all-gather per unit, and in backward another and a reduction.
    Raises: CompositionError, PhaseError, before anything is sent, if the module is no
        unit below a running forward; PhaseError in backward, if the loss left the
        result out, with create_graph or inputs, or if the module was also called
        without ``call_where``; other ranks then raise DesyncError.

    >>> class Seeing(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.sight, self.head = fully_shard(nn.Linear(8, 4)), nn.Linear(4, 1)
    ...     def forward(self, text, image=None):
    ...         seen = call_where(self.sight, image is not None, image)
    ...         return self.head(text + seen)
    >>> fully_shard(Seeing())(torch.ones(2, 4)).shape
    torch.Size([2, 1])
    """
    require_module(module, "call_where")
    inner = inside_wrappers(module)
    state = OWNERS.get(inner)
    if state is None or state.modules != (inner,):
        raise CompositionError(
            f"call_where expects a fully sharded module, got a {type(module).__name__} "
            "that is no unit by itself. Apply fully_shard to it, or pass one that is."
        )
    context, recomputing = state.context, current_task() != NO_TASK
    if context is None or not (recomputing or context.entered not in (None, state)):
        raise PhaseError(
            f"call_where of {state.name} expects to be called in the forward of a unit "
            "above it. Apply fully_shard to the whole model, and call the model."
        )
    zero = torch.zeros((), device=state.device)
    if isinstance(context.order, _Call) and state in context.order.states:
        return module(*args, **kwargs) if used else zero
    call, taped = _Call(context, state), torch.is_grad_enabled()
    needs = taped and used and _need_gradients(args, kwargs)
    byte = call.agreed(bool(used) + 2 * needs, taped=taped)
    if not byte:
        return zero
    taped = taped and (byte > 1 or any(s.handle.layout.trainable for s in call.states))
    run = partial(module, *args, **kwargs) if used else zero.clone
    return call.run(run, taped=taped, recomputing=recomputing)


def _need_gradients(*values: Any) -> bool:
    """Return whether a tensor in ``values`` requires a gradient."""
    given = _pytree.tree_leaves(values)
    return any(isinstance(each, Tensor) and each.requires_grad for each in given)


class _Call(GradientOrder):
    """A call on this rank, and the order of the units inside: no rank compares it."""

    def __init__(self, context: RuntimeContext, state: _FSDPState) -> None:
        super().__init__()
        self.context, self.name, self.outer = context, state.name, context.order
        self.place, below = self.outer.count, {state}
        units = root_of(context)._root_states  # a unit above comes first
        below.update(each for each in units if each.parent in below)
        self.states = [each for each in units if each in below]
        self.forms: list[Any] = []
        ahead = [(*s.ahead_in_forward, *s.ahead_in_backward) for s in self.states]
        slots = [slot for s in self.states if (slot := s.handle.form.arena_slot)]
        if isinstance(self.outer, _Call):
            raise self.refused("is inside that of a module that it is not below.")
        if not below.issuperset(chain(*ahead)) or len(set(slots)) < len(slots):
            raise self.refused("would prefetch other units, or share Arena slots.")
        if any(s.handle in self.outer.graphs for s in self.states):
            raise self.refused(_PLAIN)

    def groups(self, *, taped: bool) -> dict[dist.ProcessGroup, None]:
        """Return the groups over which the call communicates, in forward or in all."""
        of = [s.handle.groups for s in self.states if s.handle.groups.has_peers]
        each = [(g.shard, g.replicate if taped else None) for g in of]
        return dict.fromkeys(filter(None, chain.from_iterable(each)))

    def agreed(self, byte: int, *, taped: bool) -> int:
        """Return the bits that any rank has set."""
        for group in self.groups(taped=taped):
            found = collectives.all_gather_numbers(
                "all_gather_byte", [byte], group, "call_where", torch.uint8
            )
            byte = reduce(or_, found)
        return byte

    def refused(self, why: str) -> PhaseError:
        """Tell the other ranks, and return the error."""
        text = f"call_where of {self.name} {why}"
        for group in self.groups(taped=True):
            operation_log(group).recorder.raises(text)
        return PhaseError(text)

    def recomputed(self) -> _Call:
        """Return the order of a forward that is recomputed inside the call."""
        order = copy(self)
        super(_Call, order).__init__()
        return order

    def gather(self, phase: Phase) -> None:
        """Issue the gathers of all units, and keep them until ``kept`` is false."""
        for at, state in enumerate(self.states):
            handle = state.handle
            handle.phase, handle.logs = phase, NO_LOGS
            if self.forms and handle.form is not self.forms[at]:
                raise earlier_forward(f"unit {state.name}")
            if handle.residency in NOT_GATHERED:
                unshard.unshard(self.context, handle)
            handle.kept_for_backward = True
        self.forms, self.context.order = [s.handle.form for s in self.states], self

    def run(self, run: Callable[[], Any], *, taped: bool, recomputing: bool) -> Any:
        """Call ``run`` with full units; a recomputed forward leaves them so."""
        try:
            self.gather(BACKWARD_PRE if recomputing else FORWARD)
            return self.marked(run) if taped else run()
        finally:
            self.context.order = self.outer
            if not recomputing:
                # First, because the wait for a unit may raise.
                for state in self.states:
                    state.handle.kept_for_backward, state.remaining = False, frozenset()
            for state in self.states:
                handle = state.handle
                if handle.residency not in NOT_GATHERED:
                    unshard.wait_unsharded(handle)
                if recomputing:  # backward releases them, equal on all ranks
                    handle.phase = BACKWARD_PRE if taped else IDLE
                else:
                    end_unit_forward(self.context, state, awaited=taped)

    def marked(self, run: Callable[[], Any]) -> Any:
        """Return what ``run`` does, between the two nodes of the graph."""
        token = torch.zeros((), device=self.states[0].device, requires_grad=True)
        (token,) = _Node.apply(self.leave, token)  # type: ignore[no-untyped-call]
        output = run()
        found = [
            each
            for each in _pytree.tree_leaves(output)
            if isinstance(each, Tensor)
            and (each.is_floating_point() or each.is_complex())
        ]
        if not found:
            raise self.refused("returned no tensor for a loss. Return one.")
        _, *after = _Node.apply(self.enter, token, *found)  # type: ignore[no-untyped-call]
        self.node = weakref.ref(after[0].grad_fn)
        outer = (top := self.context.entered) and top.handle.calls[-1]
        if isinstance(outer, UnitForward):
            outer.passage = SimpleNamespace(leave=partial(self.watch, outer.passage))
        marked = dict(zip(map(id, found), after, strict=True))
        return _pytree.tree_map(lambda each: marked.get(id(each), each), output)

    def watch(self, passage: Any, *of_call: Any) -> Any:
        """Leave the outermost forward, and hook where its backward begins."""
        output, tensors = passage.leave(*of_call)
        for node in grad_fns_of(tensors, 0):
            node.register_prehook(self.check)
        return output, tensors

    def check(self, _: object) -> None:
        """Refuse a backward that can never enter the call."""
        if self.node() is None and not graph_task.parameters_not_requested():
            raise self.refused(
                "was left out of the loss on this rank. Add the result to the loss."
            )

    def enter(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Gather the units for backward, after what younger units owe other ranks."""
        # A checkpoint around the call recomputes here at the latest, on all ranks.
        (token,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not graph_task.will_run(ctx.next_functions[0][0]):
            raise self.refused("expects backward without create_graph or inputs.")
        graph_task.register_task_end(self.context, self.states[0], current_task())
        orders = [order for s in self.states for order in s.handle.backward.orders]
        if any(type(order) is not _Call for order in orders):
            raise self.refused(_PLAIN)
        self.outer.issue_until(self.context, self.place - 1)
        self.gather(BACKWARD_PRE)
        return torch.zeros_like(token), *gradients[1:]

    def reach(self, context: RuntimeContext, *_: object) -> None:
        """Refuse a graph task inside the call, whose end would reduce."""
        if len(context.tasks) > 1:
            raise self.refused("holds a checkpoint. Use use_reentrant=False.")

    def reduce(self, context: RuntimeContext, handle: FlatParamHandle) -> None:
        """Do nothing: other ranks may not run the unit, and ``leave`` reduces it."""

    def leave(self, *_: object) -> None:
        """Reduce the units, last to first, and give all of them up."""
        context = self.context
        context.order = self.outer
        for state in reversed(self.states):
            unit = state.handle
            if not unit.layout.trainable:
                continue
            unit.reduction.due = True
            copy_grads_to_reduce_buffers(context, unit)
            zero_missing(unit)
            for region in unit.layout.trainable:
                region.reduce.arrived[:] = bytes(
                    [leaf.requires_grad for leaf in region.leaves]
                )
            if state.settings.sync_gradients:
                reduce_gradients(context, unit)
        for state in self.states:
            handle, reshards = state.handle, state.settings.reshard_after_backward
            unshard.wait_unsharded(handle)
            unshard.end_use(context, handle, reshards, kept=False)
            if handle.backward.task == NO_TASK:
                handle.phase = IDLE


class _Node(torch.autograd.Function):
    """A node of the graph at which backward enters a call, or leaves it."""

    @staticmethod
    def forward(ctx: Any, reached: Any, *tensors: Tensor) -> Any:
        """Return copies of the tensors, the first of which leads to the other node."""
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensors[0])
        return tuple([each.clone() for each in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Enter or leave the call."""
        return None, *(ctx.reached(ctx, *gradients) or (None,))
