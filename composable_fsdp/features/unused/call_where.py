"""A unit that only some ranks run: the other ranks join its gathers and reductions.

All ranks send the same in a call, whether or not they run the module::

    forward     [agree] [gather a b c]   run a(b, c), or nothing         [reshard]
    backward    [gather a b c]   backward of a(b, c), or nothing   [reduce c b a]

Two nodes of the graph are the ends of the call in backward. The engine runs nodes from
the youngest to the oldest, so the call's place in forward is, mirrored, its place in
backward on all ranks. In between the units stay full: checkpoints recompute in an order
that ranks which do not run the module cannot know.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from composable_fsdp.comm import collectives
from composable_fsdp.comm.operations import leave
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.gradients import zero_missing
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import NOT_GATHERED
from composable_fsdp.flat.use_order import NO_LOGS
from composable_fsdp.phases import BACKWARD_PRE, FORWARD, IDLE
from composable_fsdp.runtime import graph_task, precision, reduce, unshard
from composable_fsdp.runtime.backward import UnitForward, grad_fns_of
from composable_fsdp.runtime.graph_task import current_task
from composable_fsdp.runtime.recover import GradientOrder
from composable_fsdp.tree.state import OWNERS, RuntimeContext, _FSDPState, root_of
from composable_fsdp.tree.traversal import inside_wrappers, require_module

_PLAIN = (
    "expects its units to run in this forward by call_where alone, which some ranks "
    "skip. Call the unit through call_where everywhere, or nowhere."
)


def call_where(module: nn.Module, used: bool, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` where ``used`` is true; the other ranks join what it sends.

    For a part that a rank's batch may not need, such as the image encoder. Every rank
    makes the call, at the same place of the model's forward. The gradients are those of
    the plain model over the union of the batches if the loss of the union is the mean
    of the ranks' losses: they are averaged over all ranks, with zeros of ranks that do
    not run the module. If a rank runs the module, all its trainable parameters get a
    gradient; else none does. From end to end of the call, in forward and in backward,
    its units are full together. Inside the module, ``call_where`` sends nothing.

    Args:
        module: A unit below the one that runs: ``fully_shard`` was given the module.
        used: Whether this rank runs the module. Ranks that share a tensor-parallel or
            an expert-parallel group must agree.
        args, kwargs: Passed to the module.

    Returns: ``module(*args, **kwargs)`` where ``used`` is true; elsewhere a zero, of
        shape () in float32 on the compute device, to be added to the loss or to what
        the loss is computed from. The loss must depend on it on every rank.
    Collective: an all-gather of one byte per rank over the shard group; with gradients
        enabled, also over the replicate group. If a rank runs the module, an all-gather
        per unit, and in backward an all-gather and a reduction per unit. The host
        waits for the byte.
    Raises: CompositionError, PhaseError, before anything is sent, if the module is no
        unit below a running forward; PhaseError in backward, if the loss left the
        result out, with create_graph, for part of the parameters, or if the module was
        also called without ``call_where``; other ranks then raise DesyncError.

    >>> class Seeing(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.sight, self.head = fully_shard(nn.Linear(8, 4)), nn.Linear(4, 1)
    ...
    ...     def forward(self, text, image=None):
    ...         seen = call_where(self.sight, image is not None, image)
    ...         return self.head(text + seen)
    >>> fully_shard(Seeing())(torch.ones(2, 4)).shape
    torch.Size([2, 1])
    """
    require_module(module, "call_where")
    state = OWNERS.get(inside_wrappers(module))
    if state is None or state.modules != (inside_wrappers(module),):
        raise CompositionError(
            f"call_where expects a fully sharded module, got a {type(module).__name__} "
            "that is no unit by itself. Apply fully_shard to it, or pass one that is."
        )
    context, recomputing = state.context, current_task() != NO_TASK
    if context is None or not (recomputing or context.outermost not in (None, state)):
        raise PhaseError(
            f"call_where of {state.name} expects to be called in the forward of a unit "
            "above it. Apply fully_shard to the whole model, and call the model."
        )
    zero = torch.zeros((), device=state.device)
    if isinstance(context.order, _CallOrder) and state in context.order.call.states:
        return module(*args, **kwargs) if used else zero
    call, taped = _Call(context, state), torch.is_grad_enabled()
    given = _pytree.tree_leaves((args, kwargs)) if used and taped else ()
    needs = any(isinstance(each, Tensor) and each.requires_grad for each in given)
    # Bits: a rank runs the module; an input of a rank requires grad.
    byte = bool(used) + 2 * needs
    for group in call.groups(taped=taped):
        for other in collectives.all_gather_byte(byte, group, "call_where"):
            byte |= other
    if not byte:
        return zero
    taped = taped and (byte > 1 or any(s.handle.layout.trainable for s in call.states))
    with call.gathered(taped=taped, recomputing=recomputing):
        token: Any = zero.clone().requires_grad_(taped)
        if taped:
            token = _First.apply(call, token)  # type: ignore[no-untyped-call]  # torch's
        output = module(*args, **kwargs) if used else zero
        return call.mark(token, output) if taped else output


class _CallOrder(GradientOrder):
    """The order of the units inside a call, which ranks do not compare."""

    __slots__ = ("call",)

    def __init__(self, call: _Call) -> None:
        super().__init__(call.outer.mode)
        self.call = call

    def recomputed(self) -> _CallOrder:
        """Return the order of a forward that is recomputed inside the call."""
        return _CallOrder(self.call)

    def reach(self, context: RuntimeContext, *_: object) -> None:
        """Refuse a graph task inside the call, whose end would reduce."""
        if len(context.tasks) > 1:
            raise self.call.refused(
                "holds a checkpoint with use_reentrant=True, in a backward of its own. "
                "Use use_reentrant=False."
            )

    def reduce(self, context: RuntimeContext, handle: FlatParamHandle) -> None:
        """Reduce the unit in its turn, if backward is through the unit."""
        if not handle.backward.open_calls and not handle.backward.pending:
            self.call.reduce(handle)


class _Call:
    """A call on this rank, for the two nodes of the graph."""

    def __init__(self, context: RuntimeContext, state: _FSDPState) -> None:
        self.context, self.name, self.outer = context, state.name, context.order
        self.place = self.outer.count
        below = {state}
        units = root_of(context)._root_states  # a unit above comes first
        below.update(each for each in units if each.parent in below)
        self.states = [each for each in units if each in below]
        self.forms: list[Any] = []
        self.waiting: list[_FSDPState] = []  # for their reduction, the next one last
        self.through: set[FlatParamHandle] = set()  # in this backward
        self.node: Any = None  # weak, of the node at the end
        ahead = [
            t for s in self.states for t in (*s.ahead_in_forward, *s.ahead_in_backward)
        ]
        slots = [s.handle.form.slot for s in self.states if s.handle.form.slot]
        if isinstance(self.outer, _CallOrder):
            raise self.refused(
                "is inside that of another module, which it is not below."
            )
        if not below.issuperset(ahead) or len(set(slots)) < len(slots):
            raise self.refused(
                "would prefetch other units, or share slots of an Arena."
            )
        if any(s.handle in self.outer.open_calls for s in self.states):
            raise self.refused(_PLAIN)

    def groups(self, *, taped: bool) -> dict[dist.ProcessGroup, None]:
        """Return the groups over which the call communicates, in forward or in all."""
        of = [s.handle.groups for s in self.states if s.handle.groups.has_peers]
        each = [(g.shard, g.replicate if taped else None) for g in of]
        return dict.fromkeys(filter(None, chain.from_iterable(each)))

    def refused(self, why: str) -> PhaseError:
        """Tell the other ranks, and return the error."""
        text = f"call_where of {self.name} {why}"
        for group in self.groups(taped=True):
            leave(group, text)
        return PhaseError(text)

    def gather(self) -> None:
        """Issue the gathers of all units, and keep them until ``kept`` is false."""
        for state in self.states:
            if state.handle.residency in NOT_GATHERED:
                unshard.unshard(self.context, state.handle)
            state.handle.kept = True

    @contextmanager
    def gathered(self, *, taped: bool, recomputing: bool) -> Iterator[None]:
        """Keep the units full; a recomputed forward leaves them so for backward."""
        logs = [state.handle.logs for state in self.states]
        try:
            for state in self.states:
                state.handle.logs = NO_LOGS
                state.handle.phase = BACKWARD_PRE if recomputing else FORWARD
                if state.precision is not None:
                    precision.select_forward_form(self.context, state, state.module)
            self.forms = [state.handle.form for state in self.states]
            self.gather()
            self.context.order = _CallOrder(self)
            yield
        finally:
            self.context.order = self.outer
            for state, log in zip(self.states, logs, strict=True):
                handle, handle.logs = state.handle, log
                if recomputing:  # backward releases them, equal on all ranks
                    unshard.wait_unsharded(handle)
                    handle.phase = BACKWARD_PRE if taped else IDLE
                    continue
                handle.kept, state.remaining = False, frozenset()
                handle.phase = BACKWARD_PRE if taped else IDLE
                if state.settings.reshard_after_forward or not taped:
                    unshard.reshard(self.context, handle)
                else:
                    unshard.wait_unsharded(handle)
                    unshard.hold_for_backward(handle)

    def mark(self, token: Tensor, output: Any) -> Any:
        """Return the output, through the node at which backward enters the call."""
        found, spec = _pytree.tree_flatten(output)
        at = [i for i, each in enumerate(found) if isinstance(each, Tensor)]
        at = [i for i in at if found[i].is_floating_point() or found[i].is_complex()]
        if not at:
            raise self.refused("returned no tensor for a loss. Return one.")
        every: Any = [found[i] for i in at]
        marked = _Last.apply(self, token, *every)  # type: ignore[no-untyped-call]  # torch's
        for i, each in zip(at, marked, strict=True):
            found[i] = each
        self.node = weakref.ref(found[at[0]].grad_fn)
        if self.context.outermost is not None:
            outer = self.context.outermost.handle.running.calls[-1]
            if isinstance(outer, UnitForward):
                outer.passage = _Watched(outer.passage, self)
        return _pytree.tree_unflatten(found, spec)

    def enter(self) -> None:
        """Gather the units for backward, after what younger units owe other ranks."""
        context, task = self.context, current_task()
        reached = [s.handle for s in self.states if s.handle.backward.task == task]
        if any(type(o) is not _CallOrder for h in reached for o in h.backward.orders):
            raise self.refused(_PLAIN)
        graph_task.register_task_end(context, self.states[0], task)
        self.outer.issue_until(context, self.place - 1)
        for state, form in zip(self.states, self.forms, strict=True):
            if state.handle.form is not form:
                precision.select_form(state, form)
            state.handle.phase = BACKWARD_PRE
        self.gather()
        self.waiting, self.through = list(self.states), set()
        context.order = _CallOrder(self)

    def reduce(self, *handles: FlatParamHandle) -> None:
        """Reduce the units that backward is through with, the last first."""
        self.through.update(handles)
        while self.waiting and self.waiting[-1].handle in self.through:
            state = self.waiting.pop()
            handle, logs = state.handle, state.handle.logs
            if not handle.layout.trainable:
                continue
            handle.reduction.due = True
            reduce.copy_grads_to_reduce_buffers(self.context, handle)
            zero_missing(handle)
            for region in handle.layout.trainable:
                flags = [leaf.requires_grad for leaf in region.leaves]
                region.reduce.arrived[:] = bytes(map(or_, flags, region.reduce.arrived))
            if not state.settings.sync_gradients:
                continue
            handle.logs = NO_LOGS
            try:
                reduce.reduce_gradients(self.context, handle)
            finally:
                handle.logs = logs

    def leave(self) -> None:
        """Reduce the units that are left, and give all of them up."""
        self.context.order = self.outer
        self.reduce(*[state.handle for state in self.states])
        for state in self.states:
            handle, reshards = state.handle, state.settings.reshard_after_backward
            if not reshards:
                unshard.wait_unsharded(handle)
            unshard.end_use(self.context, handle, reshards, kept=False)
            if handle.backward.task == NO_TASK:
                handle.phase = IDLE


class _First(torch.autograd.Function):
    """The oldest node of a call, where backward leaves it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor) -> Tensor:
        """Return a token for the youngest node, which leads backward here."""
        ctx.call = call
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        """Leave the call."""
        ctx.call.leave()
        return None, None


class _Last(torch.autograd.Function):
    """The youngest node of a call, where backward enters it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor, *outputs: Tensor) -> Any:
        """Return copies of the outputs."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        return tuple(each.clone() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Enter the call."""
        # A checkpoint around the call recomputes here at the latest, on all ranks.
        (token,) = ctx.saved_tensors
        first = ctx.next_functions[0][0]
        if torch.is_grad_enabled() or not graph_task.will_run(first):
            raise ctx.call.refused(
                "expects a backward of all parameters, without create_graph or inputs."
            )
        ctx.call.enter()
        return None, torch.zeros_like(token), *gradients


class _Watched:
    """The passage of the outermost forward, whose backward must enter the call."""

    def __init__(self, passage: Any, call: _Call) -> None:
        self.passage, self.call = passage, call

    def leave(self, state: _FSDPState, call: UnitForward, output: Any) -> Any:
        """Leave the forward, and hook its end in backward."""
        output, tensors = self.passage.leave(state, call, output)
        for node in grad_fns_of(tensors, 0):
            node.register_prehook(self.check)
        return output, tensors

    def check(self, _: object) -> None:
        """Refuse a backward that can never enter the call."""
        if self.call.node() is None and not graph_task.parameters_not_requested():
            raise self.call.refused(
                "was left out of the loss on this rank, which other ranks would wait "
                "for. Add what it returns to the loss, or to what leads to the loss."
            )
