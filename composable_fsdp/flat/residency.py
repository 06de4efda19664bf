"""The moves of a unit between its states of residency (``phases.Residency``).

Only the functions of this file write ``handle.residency``. They run in every step, so
each checks its move inline.
"""

from __future__ import annotations

from composable_fsdp.flat import memory
from composable_fsdp.flat.functional_params import (
    restore_functional_params,
    save_functional_params,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.part_guards import REFUSE, refuse_part
from composable_fsdp.phases import Residency, illegal_move

SHARDED, GATHERING, UNSHARDED, HIDDEN, FREE_PENDING, COPIES_SHOWN = Residency
NOT_GATHERED = SHARDED, FREE_PENDING
"""States in which a unit needs an all-gather before its full parameters are read."""


def allocate_full(handle: FlatParamHandle) -> None:
    """Allocate every ``full`` on the current stream, for an all-gather to fill."""
    if GATHERING not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, GATHERING)
    for full in handle.form.gather_lists[0]:
        memory.allocate(full)
    handle.residency = GATHERING


def gather_again(handle: FlatParamHandle) -> None:
    """Take back a unit that waits to be freed, for an all-gather into its memory."""
    if handle.residency is not FREE_PENDING:
        raise illegal_move(handle.name, handle.residency, GATHERING)
    handle.residency = GATHERING


def hold_full(handle: FlatParamHandle) -> None:
    """Mark a unit whose full parameters need no all-gather as filled."""
    if HIDDEN not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, HIDDEN)
    handle.residency = HIDDEN


def use_full(handle: FlatParamHandle) -> None:
    """Register the full leaves in the modules. The data of the leaves must be there.

    A place that shows another tensor than the sharded leaf keeps the other tensor until
    ``use_sharded``: ``torch.func.functional_call`` has put the tensor there.

    Collective: none.
    Raises: CompositionError, if such a tensor does not have the shape of the full
    parameter.
    """
    if UNSHARDED not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, UNSHARDED)
    for table, key, sharded, full in zip(
        handle.tables,
        handle.keys,
        handle.sharded_placed,
        handle.form.placed,
        strict=True,
    ):
        # Not ``table.get(key)``: a method call per place in every step.
        if key not in table or table[key] is not sharded:
            save_functional_params(handle)
            break
        table[key] = full
    handle.residency = UNSHARDED


def show_copies(handle: FlatParamHandle) -> None:
    """Mark that the modules show copies of the full parameters, over other buffers."""
    if COPIES_SHOWN not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, COPIES_SHOWN)
    handle.residency = COPIES_SHOWN


def use_sharded(handle: FlatParamHandle) -> None:
    """Register the sharded leaves, the original parameters. Collective: none."""
    for table, key, sharded in zip(
        handle.tables, handle.keys, handle.sharded_placed, strict=True
    ):
        table[key] = sharded
    # After the loop, which has overwritten the foreign tensors.
    if handle.foreign:
        restore_functional_params(handle)
    # As ``refuse_part_calls``, inlined to save a function call per step.
    if handle.parts_open:
        for hooks in handle.guards:
            if hooks:
                hooks[REFUSE] = refuse_part
                hooks.move_to_end(REFUSE, last=False)
            else:  # in most models; saves the call of ``move_to_end`` per part
                hooks[REFUSE] = refuse_part
        handle.parts_open = False
    # A unit that shows its sharded leaves already keeps its state.
    if handle.residency is UNSHARDED:
        handle.residency = HIDDEN
    elif handle.residency is COPIES_SHOWN:
        handle.residency = SHARDED


def free_full(handle: FlatParamHandle) -> None:
    """Free the memory of every ``full``.

    The sharded leaves must be registered already: a kernel that reads a freed leaf
    crashes.
    """
    if SHARDED not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, SHARDED)
    # The views, and with them the full leaves, stay valid objects without memory.
    for full in handle.form.gather_lists[0]:
        memory.free(full)
    handle.residency = SHARDED


def defer_free(handle: FlatParamHandle) -> None:
    """Mark a unit whose memory is freed later, behind its last reader on the GPU."""
    if FREE_PENDING not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, FREE_PENDING)
    handle.residency = FREE_PENDING


def drop_full(handle: FlatParamHandle) -> None:
    """Give up the values of every ``full`` and keep the memory, if there is any."""
    if SHARDED not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, SHARDED)
    handle.residency = SHARDED
