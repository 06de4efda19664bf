"""The arena of a tree: slots of memory in which the full parameters of units lie.

Without an arena, the storage of ``full`` is resized at each unshard and reshard, so
addresses change. In an arena the storage belongs to a slot and is never resized:
``full`` and the full leaves become views of it at the unit's first all-gather, before a
graph can save a view of the leaves, and stay at these addresses::

    slot 1    [ region 0 of block 0 | region 1 ]      block 0, block 2, ... in turn
    slot 2    [ region 0 of block 1 | region 1 ]      block 1, block 3, ...

``planning.slots`` decides which units share a slot, ``flat.slot_use`` moves units into
slots, and ``runtime.slots`` decides what happens if a program needs two units of a slot
at the same time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.comm.registered_memory import RegisteredMemory
from composable_fsdp.config import Arena
from composable_fsdp.flat import memory

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
                    slot.poison()
        # Once: torch registers by itself what the pool allocates later.
        if source is not None and not self.is_registered:
            self.is_registered = True
            source.register()


class Slot:
    """Memory that units of a tree use in turn for their full parameters."""

    __slots__ = ("_holder", "arena", "members", "memory", "nbytes")

    def __init__(self, arena: Slots, nbytes: int) -> None:
        self.arena, self.nbytes = arena, nbytes
        self.memory: Tensor | None = None
        """``(nbytes,)`` in uint8; ``None`` before the first use, and after the memory
        was left to an all-gather that has not ended."""
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Handles of the units whose full leaves are views of ``memory``."""
        # Weak, because units hold their slots. ``Any``: the class is in a higher layer.
        self._holder: Callable[[], Any] = _nobody

    @property
    def holder(self) -> Any:
        """The handle of the unit whose full parameters are, or were last, there."""
        return self._holder()

    def take(self, holder: object) -> None:
        """Note whose full parameters are in the slot from now on."""
        self._holder = weakref.ref(holder)

    def poison(self) -> None:
        """Overwrite the slot on the current stream, if the arena asks for it."""
        if self.arena.option.poison and self.memory is not None:
            _fill(self.memory)

    def release(self) -> None:
        """End the use of the slot by its holder, whose leaves are unreadable."""
        self._holder = _nobody
        self.poison()


@outside_transforms
@torch.no_grad()
def _fill(slot: Tensor) -> None:
    """Overwrite a slot."""
    slot.fill_(_POISON)


def _nobody() -> None:
    """Return the holder of a free slot."""
