"""Who gives way if a unit's slot of the arena is taken.

The plan gives units that a step needs together slots of their own. A program may use
its units otherwise, and then, in this order:

* a unit that only waits (prefetched, kept for backward or by hand) is resharded, and
  gathered again at its next use;
* a unit whose full leaves were never used moves to a slot of its own;
* else both units are in use and graphs may have saved views of both: an error.

All ranks run the same program, so they decide the same.
"""

from __future__ import annotations

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import (
    GATHERING,
    NOT_GATHERED,
    UNSHARDED,
    make_unreadable,
)
from composable_fsdp.flat.slot_use import is_in_slot, move_out
from composable_fsdp.tree.state import RuntimeContext


def is_vacant(handle: FlatParamHandle) -> bool:
    """Return whether no other unit has its full parameters in the unit's slot."""
    slot = handle.form.slot
    assert slot is not None
    holder: FlatParamHandle | None = slot.holder
    return holder is None or holder is handle or holder.residency in NOT_GATHERED


def find_previous(
    context: RuntimeContext, handle: FlatParamHandle
) -> FlatParamHandle | None:
    """Return the unit that must be released before ``handle`` is gathered, if any.

    The unit ``handle`` moves to a slot of its own, if its full leaves were never used
    and the other unit is in use.

    Raises: PhaseError, if both units are in use.
    """
    slot = handle.form.slot
    assert slot is not None
    holder: FlatParamHandle | None = slot.holder
    if holder is None or holder is handle:
        return None
    if not _is_in_use(context, holder):
        # A unit that was dropped between two backwards is sharded and yet readable.
        make_unreadable(holder)
        return holder
    # A unit that has run may have views saved in a graph, which would stay behind.
    if not is_in_slot(handle):
        move_out(handle)
        return None
    # Neither can wait: on all ranks, which run the same program, both are in use.
    use, way_out = "in use", "Pass"
    if _is_between_steps(context):
        use = "unsharded by hand"
        way_out = f"Call reshard on {holder.name} before, or pass"
    raise PhaseError(
        f"Fully sharded module {handle.name} is needed while {holder.name} is {use}, "
        "and both have their full parameters in the same slot of the arena, because "
        f"by the plan they are never full at the same time. {way_out} "
        "arena=Arena(shared=False), which gives each unit memory of its own."
    )


def _is_in_use(context: RuntimeContext, holder: FlatParamHandle) -> bool:
    """Return whether the full parameters of ``holder`` are being read, or shown."""
    if holder.residency is not UNSHARDED:
        # Nothing reads the parameters of a unit between its forward and its backward.
        # The program waits for an all-gather by hand that is in flight, and then reads.
        is_awaited = holder.residency is GATHERING and holder.kept_full
        return is_awaited and _is_between_steps(context)
    running, progress = holder.running, holder.backward
    if running.calls or running.foreign:
        return True
    if progress.task != NO_TASK:
        # The unit may wait for backward to reach its other calls, or, if its inputs
        # need no gradient, for the end of the whole backward. With all its gradients
        # there, nothing reads its parameters any more.
        arrived = progress.pending == 0 and holder.layout.trainable
        return progress.expected_calls > 0 or (progress.endless and not arrived)
    # Unsharded by hand: a forward or backward goes before, another such call does not.
    return _is_between_steps(context)


def _is_between_steps(context: RuntimeContext) -> bool:
    """Return whether no forward and no backward is running."""
    return context.outermost is None and not context.tasks
