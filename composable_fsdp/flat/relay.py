"""Laying a unit out anew when parameters were frozen or unfrozen since build.

Leaves stay the same objects with the same elements, so ``.grad`` and optimizer state
stay good; their data moves to the shards of the new regions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from composable_fsdp.flat import storage
from composable_fsdp.flat.handle import (
    FlatParamHandle,
    build_handle,
    remember_leaves,
    set_divisions,
)
from composable_fsdp.planning.assign import Place
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.split import split_region

_KEPT = ("__weakref__", "epoch", "fqn", "full_fqn", "origin", "rule")
"""What is of the unit and not of its regions."""


def relay(handle: FlatParamHandle) -> None:
    """Make regions that are trainable or frozen as their leaves are now.

    The unit must be idle, sharded and without memory for full parameters. ``plan`` says
    the truth afterwards. Hooks have to be put on the new full leaves. Sends nothing.
    """
    leaves = {
        slot.index: leaf
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
    }
    layouts = tuple(
        part
        for layout in handle.origin
        for part in split_region(
            layout, [leaves[slot.index].requires_grad for slot in layout.parameters]
        )
    )
    gradients = [(leaf, leaf.grad) for leaf in handle.leaves]
    made = build_handle(
        _target(handle, layouts, leaves),
        groups=handle.groups,
        device=handle.device,
        shards=[_new_shard(handle, layout, leaves) for layout in layouts],
    )
    for leaf, gradient in gradients:
        leaf.grad = gradient
    for name in FlatParamHandle.__slots__:
        if name not in _KEPT:
            setattr(handle, name, getattr(made, name))
    handle.epoch += 1
    set_divisions(handle)
    remember_leaves(handle)


def _target(
    handle: FlatParamHandle,
    layouts: tuple[RegionLayout, ...],
    leaves: dict[int, nn.Parameter],
) -> Target:
    places: dict[int, list[Place]] = {}
    for info in handle.infos:
        place = Place(info.module, info.name, info.fqn)
        places.setdefault(info.slot_index, []).append(place)
    return Target(
        plan=replace(handle.plan, regions=layouts),
        modules=(),
        parameters=tuple(
            tuple(leaves[slot.index] for slot in layout.parameters)
            for layout in layouts
        ),
        places=tuple(
            tuple(tuple(places[slot.index]) for slot in layout.parameters)
            for layout in layouts
        ),
        parent=0,
        units_below=(),
    )


@torch.no_grad()
def _new_shard(
    handle: FlatParamHandle, layout: RegionLayout, leaves: dict[int, nn.Parameter]
) -> Tensor:
    """A ``(shard_numel,)`` with this rank's elements, zero between them."""
    device = handle.regions[0].shard.device
    with torch.inference_mode(False):
        shard = storage.new_buffer(layout.shard_numel, layout.dtype, device).zero_()
        parts = layout.parts(handle.groups.rank)
        for slot, (start, stop, at) in zip(layout.parameters, parts, strict=True):
            leaf = leaves[slot.index].detach()
            shard[at : at + stop - start].copy_(leaf.reshape(-1))
    return shard
