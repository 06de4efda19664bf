"""Slots of memory in which the full parameters of units lie: a ``FullMemory``.

The storage belongs to a slot and is never resized: ``full`` and the full leaves become
views of it at the unit's first all-gather, before a graph can save a view of them.

The plan gives units that a step needs together slots of their own. Else, in this order,
on all ranks alike: a unit that only waits is resharded and gathered again; a unit whose
full leaves were never used moves to a slot of its own; both are in use: an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.config import Arena
from composable_fsdp.errors import PhaseError
from composable_fsdp.features.arena.registered_memory import RegisteredMemory
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
from composable_fsdp.tools.unit_costs import slot_bytes
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of

_POISON = 0xFF
"""Byte of a poisoned slot. With all bits 1, floating point numbers are NaN."""


class Slots:
    """The slots of a tree with equal options on a device, in the order of the plan."""

    __slots__ = ("device", "is_registered", "option", "slots", "source")

    def __init__(
        self, option: Arena, device: torch.device, source: RegisteredMemory | None
    ) -> None:
        self.option, self.device = option, device
        self.source = source
        """Where memory comes from; ``None``: from the allocator of torch."""
        self.slots: list[Slot] = []
        self.is_registered = False

    def add(self, nbytes: int) -> Slot:
        """Return a new slot, whose memory is allocated at the first use of any slot."""
        slot = Slot(self, nbytes)
        self.slots.append(slot)
        return slot

    # A transform of ``torch.func`` would wrap the memory.
    @outside_transforms
    def open(self) -> None:
        """Allocate all slots without memory, on the current stream, in order.

        Collective: with registered memory as ``RegisteredMemory.register`` at the
        first call.
        """
        source = self.source
        # All slots at once: ranks must register memory in the same order, and units may
        # be used in another order than that of the plan.
        with nullcontext() if source is None else source.allocating():
            for slot in self.slots:
                if slot.memory is None:
                    slot.memory = memory.new_buffer(
                        slot.nbytes, torch.uint8, self.device
                    )
                    slot._poison()
        # Once: torch registers by itself what the pool allocates later.
        if source is not None and not self.is_registered:
            self.is_registered = True
            source.register()


class Slot:
    """Memory that units of a tree use in turn, for full parameters or reductions."""

    __slots__ = ("_holder", "arena", "members", "memory", "nbytes")

    def __init__(self, arena: Slots, nbytes: int) -> None:
        self.arena, self.nbytes = arena, nbytes
        self.memory: Tensor | None = None
        """``(nbytes,)`` in uint8; ``None`` before the first use, and after the memory
        was left to an all-gather that has not ended."""
        self.members: weakref.WeakSet[FlatParamHandle] = weakref.WeakSet()
        """The units whose full leaves are views of ``memory``."""
        # Weak, because units hold their slots.
        self._holder: Callable[[], FlatParamHandle | None] = _nobody

    def take(self, handle: FlatParamHandle) -> None:
        """Make the free slot the memory of the full parameters; as ``Slots.open``."""
        slot = self
        if slot.memory is None:
            slot.arena.open()
        # At the first use: no graph has saved a view of the leaves yet.
        if not slot._holds(handle):
            # After a cast, a move, or parameters that were frozen since.
            if not slot._fits(handle, handle.form.fulls):
                slot = slot._move_out(handle)
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
        use, way_out = "in use", "Pass"
        if _is_between_steps(context):
            use = "unsharded by hand"
            way_out = f"Call reshard on {holder.name} before, or pass"
        raise PhaseError(
            f"Fully sharded module {handle.name} is needed while {holder.name} is "
            f"{use}, and both have their full parameters in the same slot of the "
            "arena, because by the plan they are never full at the same time. "
            f"{way_out} "
            "arena=Arena(shared=False), which gives each unit memory of its own."
        )

    def take_reductions(self, handle: FlatParamHandle) -> bool:
        """Lay the reduce buffers into the slot; False if they need other memory."""
        reduction, regions = handle.reduction, handle.layout.trainable
        if self.memory is None:
            self.arena.open()
        if self._holder() is not None or not self._fits(
            handle, [region.reduce.buffer for region in regions]
        ):
            if reduction.home is not None:
                reduction.home = None
                for reduce in (region.reduce for region in regions):
                    views = (*reduce.views, *reduce.gaps)
                    reduce.buffer = memory.leave(reduce.buffer, views)
            return False
        if reduction.home is not self.memory:
            assert self.memory is not None
            buffers = [
                (each.buffer, [*each.views, *each.gaps])
                for each in (region.reduce for region in regions)
            ]
            _lay(buffers, self.memory)
            reduction.home = self.memory
        self._holder = weakref.ref(handle)
        return True

    def leave_reductions(self, handle: FlatParamHandle) -> None:
        """Leave the memory of the slot to a reduction that may still write there."""
        self.give_back()
        handle.reduction.home = self.memory = None

    def _fits(self, handle: FlatParamHandle, buffers: Sequence[Tensor]) -> bool:
        """Return whether ``buffers`` of the unit have room, on the unit's device."""
        nbytes = slot_bytes([each.nbytes for each in buffers])
        return nbytes <= self.nbytes and self.arena.device == handle.layout.device

    def _holds(self, handle: FlatParamHandle) -> bool:
        """Return whether the full leaves of the current form are views of the slot."""
        if self.memory is None:
            return False
        here: int = handle.form.fulls[0].untyped_storage()._cdata
        home: int = self.memory.untyped_storage()._cdata
        return here == home

    def _move_out(self, handle: FlatParamHandle) -> Slot:
        """Give the unit, of whose leaves no graph has saved a view, its own slot."""
        arena = self.arena
        if arena.device != handle.layout.device:
            # Memory is registered for the device that the units had when sharded.
            arena = Slots(arena.option, handle.layout.device, None)
        own = arena.add(slot_bytes([full.nbytes for full in handle.form.fulls]))
        handle.form.slot = own
        arena.open()
        return own

    def _poison(self) -> None:
        """Overwrite the slot on the current stream, if the arena asks for it."""
        if self.arena.option.poison and self.memory is not None:
            _fill(self.memory)


def _is_in_use(context: RuntimeContext, holder: FlatParamHandle) -> bool:
    """Return whether the full parameters of ``holder`` are being read, or shown."""
    if holder.residency is not UNSHARDED:
        # Nothing reads the parameters of a unit between its forward and its backward.
        # The program waits for an all-gather by hand that is in flight, and then reads.
        is_awaited = holder.residency is GATHERING and holder.kept_for_forward
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
    return context.entered is None and not context.tasks


def _settle(handle: FlatParamHandle, slot: Tensor) -> None:
    """Make ``full`` and the full leaves of the current form views of ``slot``."""
    buffers = []
    for region in handle.layout.regions:
        full = region.full
        if full.is_own and region.layout.padded_numel:
            views = [] if full.own_slice is None else [full.own_slice]
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


@outside_transforms
@torch.no_grad()
def _fill(slot: Tensor) -> None:
    """Overwrite a slot."""
    slot.fill_(_POISON)


def _nobody() -> None:
    """Return the holder of a free slot."""


_Key = tuple[Arena, torch.device]


def give_slots(context: RuntimeContext) -> None:
    """Give each unit with an arena its slots; the first all-gather allocates them."""
    # In forward order, so that slots are made in the same order on all ranks.
    members: dict[_Key, list[_FSDPState]] = {}
    states = root_of(context)._root_states
    for state in states:
        if state.options.arena is not None:
            key = state.options.arena, state.handle.layout.device
            members.setdefault(key, []).append(state)
    if not members:
        return
    # Here, so that a program without an arena loads nothing of the tools.
    from composable_fsdp.tools.plan import plan_of_units

    arenas = {key: Slots(*key, _source(*key, found)) for key, found in members.items()}
    plan = plan_of_units([(state.fqn, state) for state in states])
    kind = "cpu" if context.streams.host_waits else "cuda"
    planned = plan.step_memory(device_type=kind)
    for slot in planned.slots:
        # The plan knows no devices; units on several share nothing.
        made: dict[_Key, Slot] = {}
        for index in slot.units:
            handle, option = states[index].handle, states[index].options.arena
            assert option is not None
            key = option, handle.layout.device
            if handle.form.needs_fill:
                if key not in made:
                    made[key] = arenas[key].add(slot.nbytes)
                handle.form.slot = made[key]
    for option, nbytes in planned.reduce_slots:
        for key, found in members.items():
            if key[0] == option:
                reductions = arenas[key].add(nbytes)
                for state in found:
                    state.handle.reduction.slot = reductions


def _source(
    option: Arena, device: torch.device, states: Sequence[_FSDPState]
) -> RegisteredMemory | None:
    """Return where the memory of the units' arena comes from, if not from torch."""
    if option.comm_memory is None:
        return None
    # The groups that send what slots hold: full parameters, and unreduced gradients.
    # Units over the same ranks share a group, which registers once.
    of = [state.handle.groups for state in states]
    refs = [ref for g in of for ref in (g.shard_ref, g.kept_ref, g.scatter_ref)]
    groups = {ref.get().group_name: ref for ref in refs if ref is not None}
    return RegisteredMemory(device, tuple(groups.values()))
