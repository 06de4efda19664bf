"""Where the full parameters of a unit are, and who may read the parameters.

Only this file writes ``handle.residency``. A full leaf may be read from the wait for
the all-gather until the reshard: only then its version is the sharded leaf's, which
autograd compares. ``torch._C._autograd._unsafe_set_version_counter`` is private; used
only here, checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

import re
from itertools import count
from math import prod
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import (
    LEAVES,
    NO_TASK,
    FlatParamHandle,
    UnitLayout,
)
from composable_fsdp.flat.param_ref import place_path
from composable_fsdp.flat.part_guards import REFUSE, refuse_part
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Residency, illegal_move
from composable_fsdp.planning.dtensors import local_of

SHARDED, GATHERING, UNSHARDED, HIDDEN, FREE_PENDING, COPIES_SHOWN = Residency
NOT_GATHERED = SHARDED, FREE_PENDING
"""States in which a unit needs an all-gather before its full parameters are read."""

set_versions = torch._C._autograd._unsafe_set_version_counter
"""Set the version counters of a tuple of tensors."""
version_of = attrgetter("_version")
"""Return the version counter of a tensor without a Python-level function call."""

_FIRST = 1 << 31
UNREADABLE = count(_FIRST)
"""Versions that mean "must not be read", above all that writes reach; of 32 bits."""


def move(handle: FlatParamHandle, then: Residency) -> None:
    """Mark the unit as ``then``: a move with which no memory and no module changes."""
    if then not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, then)
    handle.residency = then


def allocate_full(handle: FlatParamHandle) -> None:
    """Allocate every ``full`` on the current stream, for an all-gather to fill."""
    if GATHERING not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, GATHERING)
    if handle.form.arena_slot is not None:
        handle.form.arena_slot.take(handle)
    else:
        for full in handle.form.fulls:
            # ``memory.allocate``, inlined.
            nbytes, storage = full.nbytes, full.untyped_storage()
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
    handle.residency = GATHERING


def use_full(handle: FlatParamHandle) -> None:
    """Register the full leaves, whose data must be there, in the modules."""
    if UNSHARDED not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, UNSHARDED)
    swaps = handle.form.swaps
    # A plain loop, which takes half the time of ``map`` and its like.
    try:
        for table, key, sharded, full in swaps:
            if table[key] is not sharded:
                refuse_foreign(handle)  # an earlier use may have left a full leaf
            table[key] = full
    except (KeyError, CompositionError) as error:
        for table, key, sharded, full in swaps:
            if table.get(key) is full:
                table[key] = sharded
        if isinstance(error, KeyError):
            refuse_foreign(handle)
        raise
    # Parts may be called, until ``use_sharded``. A user may have cleared their hooks.
    for hooks in handle.guards:
        if REFUSE in hooks:
            del hooks[REFUSE]
    handle.residency = UNSHARDED


def use_sharded(handle: FlatParamHandle) -> None:
    """Register the sharded leaves, the original parameters."""
    for table, key, sharded, _ in handle.form.swaps:
        table[key] = sharded
    # A unit that shows its sharded leaves already keeps its state.
    if handle.residency is UNSHARDED:
        handle.residency = HIDDEN
    elif handle.residency is COPIES_SHOWN:
        handle.residency = SHARDED
    else:
        return
    # As ``refuse_part_calls``, inlined to save a function call per step.
    for hooks in handle.guards:
        alone = not hooks
        hooks[REFUSE] = refuse_part
        if not alone:
            hooks.move_to_end(REFUSE, last=False)


def free_full(handle: FlatParamHandle) -> None:
    """Free the memory of every ``full``."""
    if SHARDED not in handle.residency.followers:
        raise illegal_move(handle.name, handle.residency, SHARDED)
    if handle.form.source is not None:
        handle.form.source.before_free(handle)
    # The sharded leaves are registered already: a kernel that reads a freed leaf
    # crashes.
    if handle.form.readable is not None:  # ``make_unreadable``, inlined
        set_versions(handle.form.placed, handle.form.unreadable)
        handle.form.readable = None
    # The views, and with them the full leaves, stay valid objects without memory; in a
    # slot they stay views of the slot.
    if handle.form.arena_slot is not None:
        handle.form.arena_slot.give_back()
    else:
        for full in handle.form.fulls:
            try:  # ``memory.free``, inlined
                full.untyped_storage().resize_(0)
            except RuntimeError as error:
                memory.require_unresizable(full, error)
    handle.residency = SHARDED


def leave_full(handle: FlatParamHandle) -> None:
    """Give every ``full`` other memory, after a wait for the all-gather that raised."""
    # A rank that comes late still completes the all-gather, in a thread of the backend,
    # which writes into the memory that the collective was given.
    gathered, fulls = handle.form.gather_lists[0], handle.form.fulls
    for region in handle.layout.regions:
        full = region.full
        if not full.is_own or not memory.is_allocated(full.buffer):
            continue
        views = [] if full.own_slice is None else [full.own_slice]
        fresh = memory.leave(full.buffer, [*views, *map(local_of, full.leaves)])
        if handle.form.arena_slot is not None:
            # Nothing reads this memory before the unit moves into the slot again.
            memory.free(fresh)
        for listed in (gathered, fulls):
            listed[:] = [fresh if each is full.buffer else each for each in listed]
        region.full = full._replace(buffer=fresh)
    if handle.form.arena_slot is not None:
        handle.form.arena_slot.leave()


def defer_free(handle: FlatParamHandle) -> None:
    """Mark a unit whose memory is freed later, behind its last reader on the GPU."""
    move(handle, FREE_PENDING)
    make_unreadable(handle)


def make_readable(handle: FlatParamHandle) -> None:
    """Allow autograd to read the full leaves, whose data must be there."""
    # The version of a readable full leaf is the version of its sharded leaf: an
    # optimizer step, a load or a write between forward and backward raises the same
    # error as in plain torch. If the version differs afterwards, the full leaf was
    # written to (``passages.weight_writes``). Read at every wait: a parent's forward
    # may write to its children's shards.
    now = tuple([leaf._version for leaf in handle.layout.sharded_placed])
    if flats := handle.writes.flat_parameters:
        # An optimizer that steps on a flat parameter increments only the version of
        # the flat parameter, which stands for all leaves.
        steps = sum(map(version_of, flats))
        now = tuple([version + steps for version in now])
    if now != handle.form.readable:
        set_versions(handle.form.placed, now)
        handle.form.readable = now


def make_unreadable(handle: FlatParamHandle) -> None:
    """Make autograd refuse to read the full leaves from now on."""
    if handle.form.readable is not None:
        set_versions(handle.form.placed, handle.form.unreadable)
        handle.form.readable = None


def find_changed(text: str) -> tuple[list[str], bool]:
    """Return the parameters that autograd may have refused to read; whether sharded."""
    found = _CHANGED.search(text)
    if found is None:
        return [], False
    # By the number of elements: operators save transposed and reshaped views.
    numel = prod(int(each) for each in found[1].split(",") if each.strip())
    version = int(found[2])
    return [
        quoted(place_path(handle, at))
        for handle in dict.fromkeys(link() for link in LEAVES.values())
        if handle is not None and (handle.backward.task != NO_TASK or version >= _FIRST)
        for at, leaf in enumerate(handle.form.placed)
        if version == handle.form.unreadable[at]
        or (version == leaf._version and numel == leaf.numel())
    ], version >= _FIRST


_CHANGED = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);"
)
"""The shape and the version in autograd's error."""


def shards_are_unchanged(handle: FlatParamHandle) -> bool:
    """Return whether every leaf is registered and has its data in the shard."""
    try:
        for table, key, own, full in handle.form.swaps:
            if table[key] is not own or own.requires_grad is not full.requires_grad:
                return False
    except KeyError:
        return False
    places = handle.writes.memory
    # Empty leaves have no data address, so their storage is compared. A program changes
    # the parameters on all ranks, and in this way all ranks notice the change, whatever
    # elements each rank holds.
    return (
        all(map(eq, map(Tensor.data_ptr, places.leaves), places.addresses))
        and all(map(is_, map(Tensor.untyped_storage, places.empty), places.storages))
        and not handle.layout.on_meta
    )


def foreign_place(handle: FlatParamHandle) -> int | None:
    """Return the first place that shows a tensor which is not the unit's own."""
    for at, (table, key, sharded, full) in enumerate(handle.swaps):
        found = table.get(key)
        if found is not sharded and found is not full:
            return at
    return None


def refuse_foreign(handle: FlatParamHandle) -> None:
    """Refuse tensors of ``torch.func.functional_call`` in the place of parameters."""
    # Torch puts back what was there before, of a full unit the full leaves, when
    # nothing of this package runs: the unit could not be resharded.
    at = foreign_place(handle)
    if at is not None:
        raise CompositionError(
            f"Unit {handle.name} was called with another tensor in the place of "
            f"parameter {quoted(place_path(handle, at))}, as "
            "torch.func.functional_call puts there. A unit computes with its own "
            "parameters: call functional_call on a module that is no fully sharded "
            "module, or write the values with set_full_param."
        )


# ---- writes to shards ----------------------------------------------------------

# Without kept units the counts are not needed, and optimizer steps skip the counting.
_watching = False


def written(layout: UnitLayout) -> int:
    """Return a number that grows with every write to a sharded leaf; -1 if on meta."""
    return -1 if layout.on_meta else sum(map(version_of, layout.sharded_placed))


def shard_versions(handle: FlatParamHandle) -> tuple[int, ...]:
    """Return the step count and the versions of the shards; count steps from now on."""
    # Optimizer steps are counted separately: fused kernels do not change the versions,
    # and a rank without elements of the unit sees no write.
    global _watching
    _watching = True
    flats = handle.writes.flat_parameters
    return (handle.writes.steps, *(x._version for x in (*handle.leaves, *flats)))


def is_counting_steps() -> bool:
    """Return whether the steps of optimizers are counted."""
    return _watching
