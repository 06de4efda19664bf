"""Between shards and full values of one unit: gather, and cut out a rank's part."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.access.gather import gather_flat_values
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.runtime.offload import on_device


@torch.no_grad()
def gather_unit(
    handle: FlatParamHandle, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return the unit's full parameters by slot index, in the shards' dtype.

    The tensors are new and of the plain model's shapes. Holds one unit's buffers
    besides. ``first_only``: nothing on the other ranks.

    Collective: as ``gather_flat_values``; with ``first_only`` the first replica alone.
    None if the unit has no values yet: then the tensors are on meta.
    """
    if handle.on_meta:
        return {
            slot.index: torch.empty(
                slot.shape, dtype=region.layout.dtype, device="meta"
            )
            for region in handle.regions
            for slot in region.layout.parameters
        }
    if first_only and not handle.groups.in_first_replica:
        return {}
    shards = [on_device(handle, region.shard) for region in handle.regions]
    fulls = gather_flat_values(handle, shards, first_only=first_only)
    if not fulls:
        return {}
    return {
        slot.index: _copy(
            full[slot.offset : slot.offset + slot.numel].view(slot.shape), to_cpu
        )
        for region, full in zip(handle.regions, fulls, strict=True)
        for slot in region.layout.parameters
    }


def _copy(value: Tensor, to_cpu: bool) -> Tensor:
    return value.to("cpu", copy=True) if to_cpu else value.clone()


def part_of(
    region: FlatParameter, slot: ParameterSlot, value: Tensor, *, like: Tensor
) -> Tensor:
    """This rank's part of a full ``value``, in the shape of ``like``, its leaf."""
    start, stop = region.layout.interval(slot, region.rank)
    return value.detach().reshape(-1)[start:stop].view(like.shape)
