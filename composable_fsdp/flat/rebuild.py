"""Rebuilding a unit's regions for parameters that were cast, moved or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from composable_fsdp.flat.build import replace_layout
from composable_fsdp.flat.flat_parameter import rebind_flat_parameters
from composable_fsdp.flat.handle import FlatParamHandle, forget_leaves


def rebuild_handle(
    handle: FlatParamHandle,
    leaves: Sequence[Sequence[nn.Parameter]],
    *,
    device: torch.device,
) -> None:
    """Rebuild the regions over new leaves, with the same layout.

    The new leaves are registered in the modules and keep their gradients. Full leaves
    are new and have no hooks.

    Args:
        handle: the unit, idle and sharded.
        leaves: per region in slot order: this rank's part of each parameter, in any
            memory. All leaves of a region have the same dtype, which becomes the dtype
            of the region.
        device: the new compute device.

    Collective: none.
    """
    forget_leaves(handle)
    # The layout stays, even if a narrower dtype makes shard boundaries less than
    # 16-byte aligned: another layout would move elements between ranks.
    before = handle.layout
    layouts = []
    for old, parameters in zip(before.regions, leaves, strict=True):
        dtype = parameters[0].dtype if parameters else old.layout.dtype
        layouts.append(replace(old.layout, dtype=dtype))
    # ``origin`` may divide the parameters into other regions than ``plan`` does, so the
    # new dtypes are found by slot.
    dtypes = {slot.index: each.dtype for each in layouts for slot in each.parameters}
    replace_layout(
        handle,
        replace(before.plan, regions=tuple(layouts)),
        leaves,
        before.places,
        before.owners,
        origin=tuple(
            replace(each, dtype=dtypes[each.parameters[0].index])
            if each.parameters
            else each
            for each in before.origin
        ),
        device=device,
    )
    for leaf in handle.leaves:
        if leaf.grad is not None and leaf.grad.device != leaf.device:
            # Torch requires ``.grad`` and the parameter to be on the same device.
            leaf.grad = None
    rebind_flat_parameters(handle, before.regions)
    # Tied places that still show another parameter get the adopted parameter.
    for parameters_of, name, leaf, _ in handle.swaps:
        parameters_of[name] = leaf
