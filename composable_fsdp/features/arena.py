"""Slots of memory in which the full parameters of units lie.

A slot's storage is never resized. Full leaves move there at the unit's first
all-gather, before a graph can save a view of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.config import Arena
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import (
    GATHERING,
    NOT_GATHERED,
    UNSHARDED,
    make_unreadable,
    written,
)
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.runtime.unshard import release
from composable_fsdp.tools.memory import slot_bytes
from composable_fsdp.tree.state import RuntimeContext, root_of

_POISON = 0xFF
"""Byte of a poisoned slot. With all bits 1, floating point numbers are NaN."""


class Slot:
    """Memory that units of a tree use in turn for their full parameters."""

    __slots__ = ("_holder", "device", "members", "memory", "nbytes", "option")

    def __init__(self, option: Arena, device: torch.device, nbytes: int) -> None:
        self.option, self.device, self.nbytes = option, device, nbytes
        self.memory: Tensor | None = None
        """``(nbytes,)`` in uint8; None before the first use, or once left behind."""
        self.members: weakref.WeakSet[FlatParamHandle] = weakref.WeakSet()
        """The units whose full leaves are views of ``memory``."""
        # Weak, because units hold their slots.
        self._holder: Callable[[], FlatParamHandle | None] = _nobody

    def take(self, handle: FlatParamHandle) -> None:
        """Make the free slot the memory of the full parameters."""
        slot = self
        # At the first use: no graph has saved a view of the leaves yet.
        if not slot._holds(handle):
            # After a cast, a move, or parameters that were frozen since.
            if _nbytes(handle) > slot.nbytes or slot.device != handle.layout.device:
                slot = slot._move_out(handle)
            if slot.memory is None:
                slot._open()
            assert slot.memory is not None
            _settle(handle, slot.memory)
            slot.members.add(handle)
        slot._holder = weakref.ref(handle)

    def give_back(self) -> None:
        """End the use of the slot by its holder, whose leaves are unreadable."""
        self._holder = _nobody
        self._poison()

    def leave(self) -> None:
        """Leave the memory of the slot to a collective that may still write there."""
        for handle in self.members:
            before = written(handle.layout)
            # Graphs may have saved views of the leaves, which do not move. A readable
            # leaf has the version of its sharded leaf, with which no tensor was saved
            # from now on.
            torch.autograd.graph.increment_version(handle.leaves)
            # Not a write of the user before the first forward.
            if handle.writes.at_build == before:
                handle.writes.at_build = written(handle.layout)
        self.members.clear()
        self.memory = None

    def is_vacant(self, handle: FlatParamHandle) -> bool:
        """Return whether no other unit has its full parameters in the slot."""
        holder = self._holder()
        return holder is None or holder is handle or holder.residency in NOT_GATHERED

    def make_way(self, context: RuntimeContext, handle: FlatParamHandle) -> None:
        """Release the unit in the slot, or give ``handle`` a slot of its own."""
        holder = self._holder()
        if holder is None or holder is handle:
            return
        if not _is_in_use(context, holder):
            # A unit that was dropped between two backwards is sharded and yet readable.
            make_unreadable(holder)
            # On CUDA the slot is free behind its last reader.
            release(context, holder)
            return
        # A unit that has run may have views saved in a graph, which would stay behind.
        if not self._holds(handle):
            self._move_out(handle)
            return
        # Neither can wait: on all ranks, which run the same program, both are in use.
        raise PhaseError(
            f"Fully sharded module {handle.name} is needed while {holder.name} is in "
            "use, and both have their full parameters in the same slot of the arena, "
            "because by the plan they are never full at the same time. Call reshard "
            f"on {holder.name} before, if it was unsharded by hand, or pass "
            "arena=Arena(shared=False), which gives each unit memory of its own."
        )

    def _holds(self, handle: FlatParamHandle) -> bool:
        """Return whether the full leaves of the current form are views of the slot."""
        if self.memory is None:
            return False
        here: int = handle.form.fulls[0].untyped_storage()._cdata
        home: int = self.memory.untyped_storage()._cdata
        return here == home

    def _move_out(self, handle: FlatParamHandle) -> Slot:
        """Give the unit, of whose leaves no graph has saved a view, its own slot."""
        own = Slot(self.option, handle.layout.device, _nbytes(handle))
        handle.form.arena_slot = own
        return own

    # A transform of ``torch.func`` would wrap the memory.
    @outside_transforms
    def _open(self) -> None:
        """Allocate the memory of the slot, on the current stream."""
        self.memory = memory.new_buffer(self.nbytes, torch.uint8, self.device)
        self._poison()

    @outside_transforms
    @torch.no_grad()
    def _poison(self) -> None:
        """Overwrite the slot on the current stream, if the arena asks for it."""
        if self.option.poison and self.memory is not None:
            self.memory.fill_(_POISON)


def _nbytes(handle: FlatParamHandle) -> int:
    """Return the bytes that the full parameters of the unit take in a slot."""
    return slot_bytes([full.nbytes for full in handle.form.fulls])


def _is_in_use(context: RuntimeContext, holder: FlatParamHandle) -> bool:
    """Return whether the full parameters of ``holder`` are being read, or shown."""
    if holder.residency is not UNSHARDED:
        # Nothing reads the parameters of a unit between its forward and its backward.
        # The program waits for an all-gather by hand that is in flight, and then reads.
        is_awaited = holder.residency is GATHERING and holder.kept_for_forward
        return is_awaited and _is_between_steps(context)
    progress = holder.backward
    if holder.calls:
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
    return context.entered is None and not context.tasks


@outside_transforms
@torch.no_grad()
def _settle(handle: FlatParamHandle, slot: Tensor) -> None:
    """Make ``full`` and the full leaves of the current form views of ``slot``."""
    at = 0
    with memory.outside_inference():
        for region in handle.layout.regions:
            full, buffer = region.full, region.full.buffer
            if not (full.is_own and region.layout.padded_numel):
                continue
            views = [] if full.own_slice is None else [full.own_slice]
            stop = at + slot_bytes([buffer.nbytes])
            home = slot[at:stop].view(buffer.dtype)[: buffer.numel()]
            # The buffer last, because the offset of the others is relative to it.
            memory.move(
                [*views, *map(local_of, full.leaves), buffer],
                home,
                since=int(buffer.storage_offset()),
            )
            at = stop


def _nobody() -> None:
    """Return the holder of a free slot."""


def give_slots(context: RuntimeContext) -> None:
    """Give each unit with an arena its slot; the first all-gather allocates it."""
    states = root_of(context)._root_states
    if not any(state.options.arena for state in states):
        return
    # Here, so that a program without an arena loads nothing of the tools.
    from composable_fsdp.tools.plan import plan_of_units

    plan = plan_of_units([(state.fqn, state) for state in states])
    kind = "cpu" if context.streams.host_waits else "cuda"
    for planned in plan.step_memory(device_type=kind).slots:
        # The plan knows no devices; units on several share nothing.
        made: dict[torch.device, Slot] = {}
        for index in planned.units:
            handle, option = states[index].handle, states[index].options.arena
            assert option is not None
            device = handle.layout.device
            if handle.form.needs_fill:
                if device not in made:
                    made[device] = Slot(option, device, planned.nbytes)
                handle.form.arena_slot = made[device]
