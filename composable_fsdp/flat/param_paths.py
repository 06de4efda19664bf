"""Paths of parameters from the root, by which messages name a parameter.

The names in a plan begin at a module of the unit: in a unit of several modules, two of
its parameters may have the same name there.
"""

from __future__ import annotations

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name
from composable_fsdp.planning.layout import ParameterSlot


def place_path(handle: FlatParamHandle, at: int) -> str:
    """Return the path of the parameter at place number ``at`` of the layout."""
    place, owner = handle.layout.places[at], handle.layout.owners[at]
    path = handle.paths.get(id(owner))
    # Most units have a single module, whose path begins all names of the plan.
    if path is None:
        return join_name(handle.full_fqn, place.fqn)
    return join_name(path, place.name)


def slot_paths(
    handle: FlatParamHandle, slot: ParameterSlot, unit: str | None = None
) -> list[str]:
    """Return all paths of a parameter; a tied parameter has several."""
    if not handle.paths:
        start = handle.full_fqn if unit is None else unit
        return [join_name(start, fqn) for fqn in slot.fqns]
    places = enumerate(handle.layout.places)
    return [place_path(handle, at) for at, p in places if p.slot_index == slot.index]


def slot_path(handle: FlatParamHandle, slot: ParameterSlot) -> str:
    """Return the path of a parameter; of a tied parameter the first."""
    return slot_paths(handle, slot)[0]


def param_path(handle: FlatParamHandle, index: int) -> str:
    """Return the path of the parameter that ``find_leaf`` gives the ``index``."""
    # Asked for each use of a parameter, so a list of all would be quadratic.
    for region in handle.layout.regions:
        slots = region.layout.parameters
        if index < len(slots):
            return slot_path(handle, slots[index])
        index -= len(slots)
    raise IndexError(f"unit {handle.full_fqn!r} has no parameter {index}")
