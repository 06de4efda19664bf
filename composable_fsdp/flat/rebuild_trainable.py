"""Rebuilding a unit's regions after parameters were frozen or unfrozen.

The sharded leaves stay the same objects with the same elements, so ``.grad`` and
optimizer state stay valid; the data of the leaves moves to the shards of the new
regions.
"""

from __future__ import annotations

from dataclasses import replace

from composable_fsdp.flat.build import build_handle, set_divisions
from composable_fsdp.flat.flat_parameter import rebind_flat_parameters
from composable_fsdp.flat.handle import FlatParamHandle, remember_leaves
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.split import split_region

_KEPT = (
    "__weakref__",
    "backward_log",
    "epoch",
    "forward_log",
    "fqn",
    "full_fqn",
    "gathered_at",
    "origin",
    "reduce_log",
    "rule",
)
"""Fields of the handle that belong to the unit and not to its regions."""


def rebuild_for_requires_grad(handle: FlatParamHandle) -> bool:
    """Rebuild the regions, so that regions are trainable or frozen as their leaves are.

    The unit must be idle, sharded and without memory for full parameters. Afterwards
    ``plan`` describes the new regions, and the new full leaves have no hooks.

    Returns: whether flat parameters were retired.
    Collective: none.
    """
    # Every rank keeps the same elements: regions are only split along the planned
    # layout, so no element moves to another rank.
    before = handle.regions
    made = build_handle(
        _target(handle),
        groups=handle.groups,
        device=handle.device,
        sharded=True,
        # The parts are the same modules as before.
        guarded=handle.guards,
    )
    # The handle itself must stay the same object, because states, hooks and records
    # refer to it.
    for name in FlatParamHandle.__slots__:
        if name not in _KEPT:
            setattr(handle, name, getattr(made, name))
    # Graphs of earlier forwards refer to the old buffers; backward compares ``epoch``.
    handle.epoch += 1
    # Again, because ``build_handle`` computed the divisions with a default
    # ``ReduceRule``.
    set_divisions(handle)
    remember_leaves(handle)
    return rebind_flat_parameters(handle, before)


def _target(handle: FlatParamHandle) -> Target:
    """Return the build target of the unit with regions split by ``requires_grad``."""
    leaves = {ref.slot.index: ref.leaf for ref in param_refs(handle)}
    layouts = tuple(
        part
        for layout in handle.origin
        for part in split_region(
            layout, [leaves[slot.index].requires_grad for slot in layout.parameters]
        )
    )
    # Places must be in the order of the new regions.
    order = [slot.index for layout in layouts for slot in layout.parameters]
    at = {index: i for i, index in enumerate(order)}
    placed = sorted(
        zip(handle.places, handle.owners, strict=True),
        key=lambda pair: at[pair[0].slot_index],
    )
    return Target(
        plan=replace(handle.plan, regions=layouts),
        modules=(),
        members=(),
        parameters=tuple(
            tuple(leaves[slot.index] for slot in layout.parameters)
            for layout in layouts
        ),
        places=tuple(place for place, _ in placed),
        keys=tuple(place.name for place, _ in placed),
        owners=tuple(owner for _, owner in placed),
        parent=0,
        units_below=(),
    )
