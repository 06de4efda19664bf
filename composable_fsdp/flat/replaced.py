"""Parameters whose places in a unit were taken by others since.

``to_empty`` of a model on meta, ``load_state_dict(assign=True)`` and an assignment make
new objects. An optimizer made before still holds the old ones, which nobody uses: it
would step on nothing and say nothing. So the unit notes what it gives up.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp.flat.handle import FlatParamHandle, find_leaf


class _Place(NamedTuple):
    handle: weakref.ref[FlatParamHandle]
    slot: int
    """Of the parameter's slot, which a new layout of the unit keeps."""


_places: Any = WeakIdKeyDictionary()  # torch has no types for it
_times = 0


def record_replaced(
    handle: FlatParamHandle, leaves: Sequence[Sequence[nn.Parameter]]
) -> None:
    """Remember the leaves of ``handle`` that ``leaves`` will take the places of."""
    global _times
    for region, parameters in zip(handle.regions, leaves, strict=True):
        for slot, old, new in zip(
            region.layout.parameters, region.leaves, parameters, strict=True
        ):
            if old is not new:
                _places[old] = _Place(weakref.ref(handle), slot.index)
                # One that comes back: a weak reference to it would forbid to swap it.
                _places.pop(new, None)
                _times += 1


def times_replaced() -> int:
    """How many parameters were replaced so far."""
    return _times


def successor(parameter: nn.Parameter) -> tuple[FlatParamHandle, nn.Parameter] | None:
    """Who is in the place of a replaced ``parameter`` now; ``None`` if it was not."""
    place = _places.get(parameter)
    handle = None if place is None else place.handle()
    if handle is None or find_leaf(parameter) is not None:
        return None
    if any(table.get(key) is parameter for table, key, *_ in handle.swaps):
        return None  # it is back in its place, as the next forward will find
    now = (
        leaf
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
        if slot.index == place.slot
    )
    leaf = next(now, None)
    return None if leaf is None else (handle, leaf)
