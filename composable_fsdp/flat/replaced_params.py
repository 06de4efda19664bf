"""Which parameter took the place of which: an optimizer may hold the old one.

A parameter that a module shows in place of a sharded one is the sharded one from the
next use on. An optimizer that was made before would step on unused parameters without
an error; ``optim`` asks ``successor`` about these objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.param_ref import param_refs


class _Place(NamedTuple):
    """The unit and the slot that a replaced parameter had."""

    handle: weakref.ref[FlatParamHandle]
    slot: int
    """``ParameterSlot.index``, which stays the same when the unit is rebuilt."""


# ``Any``, because torch has no type stubs for this class.
_places: Any = WeakIdKeyDictionary()
_times = 0


def record_replaced(
    handle: FlatParamHandle, *leaves: Sequence[Sequence[nn.Parameter]]
) -> None:
    """Record the old leaves, given first, that the new leaves of ``handle`` replace."""
    global _times
    # Of a DTensor, the first leaf is already another object than the parameter.
    for region, before, after in zip(handle.layout.regions, *leaves, strict=True):
        for slot, old, new in zip(region.layout.parameters, before, after, strict=True):
            if old is not new:
                _places[old] = _Place(weakref.ref(handle), slot.index)
                # A parameter that returns is a leaf again. The entry must go, because
                # ``torch.utils.swap_tensors`` refuses a parameter that has weak
                # references.
                _places.pop(new, None)
                _times += 1


def times_replaced() -> int:
    """Return how many parameters have been replaced so far in this process."""
    return _times


def successor(parameter: nn.Parameter) -> tuple[FlatParamHandle, nn.Parameter] | None:
    """Return the unit and the leaf that replaced ``parameter``."""
    place = _places.get(parameter)
    handle = None if place is None else place.handle()
    if handle is None or find_leaf(parameter) is not None:
        return None
    # The parameter was assigned to its place again; the next forward will adopt it.
    if any(table.get(key) is parameter for table, key, *_ in handle.swaps):
        return None
    for ref in param_refs(handle):
        if ref.slot.index == place.slot:
            return handle, ref.leaf
    return None
