"""How a unit comes into its slot of an arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.flat import memory
from composable_fsdp.flat.arena import Slot, Slots
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.step_counts import written
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.planning.slots import slot_bytes


def take_slot(handle: FlatParamHandle) -> None:
    """Give the unit its slot, which must be free, for an all-gather to fill.

    At the first use ``full`` and the full leaves move there. Collective: as
    ``Slots.open``.
    """
    slot = handle.form.slot
    assert slot is not None
    fulls = handle.form.fulls
    if slot.memory is None:
        slot.arena.open()
    # At the first use: no graph has saved a view of the leaves yet, so they may move.
    if not is_in_slot(handle):
        # After a cast, a move, or parameters that were frozen since.
        if (
            slot_bytes([full.nbytes for full in fulls]) > slot.nbytes
            or slot.arena.device != handle.layout.device
        ):
            slot = move_out(handle)
        assert slot.memory is not None
        _settle(handle, slot.memory)
        slot.members.add(handle)
    slot.take(handle)


def is_in_slot(handle: FlatParamHandle) -> bool:
    """Return whether the full leaves of the current form are views of the slot."""
    slot = handle.form.slot
    if slot is None or slot.memory is None:
        return False
    here: int = handle.form.fulls[0].untyped_storage()._cdata
    home: int = slot.memory.untyped_storage()._cdata
    return here == home


def move_out(handle: FlatParamHandle) -> Slot:
    """Give the unit, of whose full leaves no graph has saved a view, its own slot."""
    slot = handle.form.slot
    assert slot is not None
    nbytes = slot_bytes([full.nbytes for full in handle.form.fulls])
    arena = slot.arena
    if arena.device != handle.layout.device:
        # Memory is registered for the device that the units had when sharded.
        arena = Slots(arena.option, handle.layout.device, None)
    handle.form.slot = own = arena.add(nbytes)
    arena.open()
    return own


def leave_slot(slot: Slot) -> None:
    """Leave the memory of a slot to a collective that may still write there.

    The units of the slot move to other memory at their next all-gather. Backward of
    their earlier forwards raises as after an optimizer step.
    """
    for handle in slot.members:
        before = written(handle.layout)
        # Graphs may have saved views of the leaves, which do not move. A readable leaf
        # has the version of its sharded leaf, with which no tensor was saved from now.
        torch.autograd.graph.increment_version(handle.leaves)
        # Not a write of the user before the first forward.
        if handle.writes.at_build == before:
            handle.writes.at_build = written(handle.layout)
    slot.members.clear()
    slot.memory = None


def take_reduce_slot(handle: FlatParamHandle) -> bool:
    """Give the unit the slot for reductions, unless another unit's gradients are there.

    Returns: False if the reduce buffers need memory of their own. No graph saves their
    views, so they move at any time. Collective: as ``Slots.open``.
    """
    reduction, regions = handle.reduction, handle.layout.trainable
    slot = reduction.slot
    assert slot is not None
    if slot.memory is None:
        slot.arena.open()
    nbytes = slot_bytes([region.reduce.buffer.nbytes for region in regions])
    if (
        slot.holder is not None
        or nbytes > slot.nbytes
        or slot.arena.device != handle.layout.device
    ):
        if reduction.home is not None:
            _move_reduce_out(handle)
        return False
    if reduction.home is not slot.memory:
        assert slot.memory is not None
        buffers = [
            (each.buffer, [*each.views, *each.gaps])
            for each in (region.reduce for region in regions)
        ]
        _lay(buffers, slot.memory)
        reduction.home = slot.memory
    slot.take(handle)
    return True


def _move_reduce_out(handle: FlatParamHandle) -> None:
    """Give the reduce buffers memory of their own."""
    handle.reduction.home = None
    for region in handle.layout.trainable:
        reduce = region.reduce
        views = (*reduce.views, *reduce.gaps)
        reduce.buffer = memory.leave(reduce.buffer, views)


def forget_reduce_slot(handle: FlatParamHandle) -> None:
    """Leave the memory of the slot to a reduction that may still write there.

    The reduce buffers have memory of their own already.
    """
    slot = handle.reduction.slot
    assert slot is not None
    slot.release()
    handle.reduction.home = slot.memory = None


def _settle(handle: FlatParamHandle, slot: Tensor) -> None:
    """Make ``full`` and the full leaves of the current form views of ``slot``."""
    buffers = []
    for region in handle.layout.regions:
        full = region.full
        if full.is_cut and region.layout.padded_numel:
            views = [] if full.own_slice is None else [full.own_slice, *full.own_parts]
            buffers.append((full.buffer, [*views, *map(local_of, full.leaves)]))
    _lay(buffers, slot)


@outside_transforms
@torch.no_grad()
def _lay(buffers: Sequence[tuple[Tensor, list[Tensor]]], slot: Tensor) -> None:
    """Move buffers, each with its views, into ``slot``, one after another."""
    at = 0
    with memory.outside_inference():
        for buffer, views in buffers:
            stop = at + slot_bytes([buffer.nbytes])
            home = slot[at:stop].view(buffer.dtype)[: buffer.numel()]
            # The buffer last, because the offset of the others is relative to it.
            memory.move([*views, buffer], home, since=int(buffer.storage_offset()))
            at = stop
