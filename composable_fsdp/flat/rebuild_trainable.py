"""Rebuilding a unit's regions after parameters were frozen or unfrozen.

The sharded leaves stay the same objects with the same elements, so ``.grad`` and
optimizer state stay valid; the data of the leaves moves to the shards of the new
regions.
"""

from __future__ import annotations

from dataclasses import replace

from composable_fsdp.flat.build import replace_layout
from composable_fsdp.flat.flat_parameter import rebind_flat_parameters
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.planning.split import split_region


def rebuild_for_requires_grad(handle: FlatParamHandle) -> bool:
    """Rebuild the regions, so that regions are trainable or frozen as their leaves are.

    The unit must be idle, sharded and without memory for full parameters. Afterwards
    the plan describes the new regions, and the new full leaves have no hooks.

    Returns: whether flat parameters were retired.
    Collective: none.
    """
    before = handle.layout
    leaves = {ref.slot.index: ref.leaf for ref in param_refs(handle)}
    # Every rank keeps the same elements: regions are only split along the planned
    # layout, so no element moves to another rank.
    layouts = tuple(
        part
        for layout in before.origin
        for part in split_region(
            layout, [leaves[slot.index].requires_grad for slot in layout.parameters]
        )
    )
    # Places must be in the order of the new regions.
    order = [slot.index for layout in layouts for slot in layout.parameters]
    at = {index: i for i, index in enumerate(order)}
    placed = sorted(
        zip(before.places, before.owners, strict=True),
        key=lambda pair: at[pair[0].slot_index],
    )
    replace_layout(
        handle,
        replace(before.plan, regions=layouts),
        [[leaves[slot.index] for slot in layout.parameters] for layout in layouts],
        tuple(place for place, _ in placed),
        tuple(owner for _, owner in placed),
        origin=before.origin,
        device=before.device,
    )
    return rebind_flat_parameters(handle, before.regions)
