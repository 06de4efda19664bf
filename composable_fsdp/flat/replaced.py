"""A registry of parameters that were replaced in their unit.

``to_empty`` of a model on meta, ``load_state_dict(assign=True)`` and an assignment
create new parameter objects. An optimizer that was created earlier still holds the old
objects and would step on unused parameters without an error. So the unit records the
parameters that were replaced, and ``optim`` reads the records.
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
    handle: FlatParamHandle, leaves: Sequence[Sequence[nn.Parameter]]
) -> None:
    """Record the leaves of ``handle`` that ``leaves`` will replace."""
    global _times
    for region, parameters in zip(handle.layout.regions, leaves, strict=True):
        for slot, old, new in zip(
            region.layout.parameters, region.leaves, parameters, strict=True
        ):
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
    """Return the unit and the leaf that replaced ``parameter``.

    ``None`` if ``parameter`` was not replaced, or is a leaf again.
    """
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
