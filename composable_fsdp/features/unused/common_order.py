"""Backward in which all ranks issue equal collectives, whichever parameters they use.

The uses of units in a forward are the same on all ranks, so backward goes through them
in reverse, and issues at each use, also a skipped one, what other ranks issue there::

    forward     [ a ] [ b ] [ c ]            uses 0 1 2, of the root 3
    this rank   root, c, a                   the loss does not reach b
    sends       gather c | reduce c, gather b | reduce b, gather a | reduce a, root

A unit is reduced when backward reaches a use from before its first forward began.
"""

from __future__ import annotations

from collections.abc import Hashable

from composable_fsdp.config import BackwardPrefetch
from composable_fsdp.flat.gradients import has_arrived
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import NOT_GATHERED, SHARDED
from composable_fsdp.runtime.graph_task import parameters_not_requested, will_run
from composable_fsdp.runtime.recover import GradientOrder
from composable_fsdp.runtime.reduce import reduce_gradients
from composable_fsdp.runtime.unshard import (
    keep_full,
    prefetch_backward,
    prefetch_listed,
    reshard,
    unshard,
    wait_unsharded,
)
from composable_fsdp.tree.state import RuntimeContext, StepOrder, _FSDPState


class CommonOrder(StepOrder):
    """An order whose backward goes through all uses, in an order that ranks share."""

    __slots__ = ("accumulates", "begins", "next", "waiting")

    def __init__(self, mode: Hashable = ()) -> None:
        super().__init__(mode)
        self.begins: dict[_FSDPState, int] = {}
        """Per unit: the number of uses that were recorded when the unit's first forward
        began."""
        # Progress of backward; set when backward reaches the forward of this order.
        self.next = 0
        """Index of the use that backward has reached last; uses are walked from the
        end."""
        self.accumulates = False
        """Whether this backward accumulates gradients of parameters; not so for
        ``autograd.grad`` of inputs."""
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
            self.accumulates = not parameters_not_requested() or any(
                will_run(node)
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
        unshard(context, handle)
    # BACKWARD_POST has no point in time that is the same on all ranks, so only
    # BACKWARD_PRE and listed units are prefetched.
    pre = handle.layout.plan.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    if state.ahead_in_backward:
        prefetch_listed(context, state, state.ahead_in_backward)
    elif pre and at > 0:
        prefetch_backward(context, order, at)


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
        reshard(context, handle)
    elif handle.residency is not SHARDED:
        wait_unsharded(handle)
        keep_full(context, handle)
