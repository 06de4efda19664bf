"""Making a unit's regions anew, over leaves that were cast, moved or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from composable_fsdp.flat.build import make_tables, reset_handle, set_divisions
from composable_fsdp.flat.flat_parameter import rebind_flat_parameters
from composable_fsdp.flat.handle import FlatParamHandle, forget_leaves, remember_leaves
from composable_fsdp.flat.region import build_region


def rebuild_handle(
    handle: FlatParamHandle,
    leaves: Sequence[Sequence[nn.Parameter]],
    *,
    device: torch.device,
) -> None:
    """Make the regions anew over ``leaves``, this rank's parts in any memory.

    Per region in slot order, of one dtype, which becomes the region's. They take the
    places of the old leaves in the modules, and keep their gradients. The layout stays,
    also where a narrower dtype makes it less than 16-byte aligned: other cuts would
    have to be sent. Full leaves are new and have no hooks. Sends nothing.
    """
    forget_leaves(handle)
    layouts, regions = [], []
    for old, parameters in zip(handle.regions, leaves, strict=True):
        dtype = parameters[0].dtype if parameters else old.layout.dtype
        layouts.append(replace(old.layout, dtype=dtype))
        regions.append(
            build_region(
                layouts[-1],
                parameters,
                rank=old.rank,
                rows=handle.rows,
                device=device,
                dtypes=handle.plan.options.dtypes(dtype),
                offload=handle.offload,
                sharded=True,
            )
        )
        for leaf in parameters:
            if leaf.grad is not None and leaf.grad.device != leaf.device:
                leaf.grad = None
    handle.plan = replace(handle.plan, regions=tuple(layouts))
    dtypes = {slot.index: each.dtype for each in layouts for slot in each.parameters}
    handle.origin = tuple(
        replace(each, dtype=dtypes[each.parameters[0].index])
        if each.parameters
        else each
        for each in handle.origin
    )
    handle.epoch += 1
    before, handle.regions, handle.device = handle.regions, tuple(regions), device
    make_tables(handle)
    set_divisions(handle)
    reset_handle(handle)
    remember_leaves(handle)
    rebind_flat_parameters(handle, before)
    for parameters_of, name, leaf, _ in handle.swaps:
        parameters_of[name] = leaf
