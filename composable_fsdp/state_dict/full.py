"""Between shards and full values of one unit: gather, and cut out a rank's part."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.flat import storage
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.runtime.offload import on_device


@torch.no_grad()
def gather_unit(handle: FlatParamHandle) -> dict[int, Tensor]:
    """Return the unit's full parameters by slot index, in the shards' dtype.

    The tensors are new and of the plain model's shapes. Holds one unit's buffers
    besides.

    Collective: one all-gather (regions coalesced) over the shard group; none if it has
    one rank, or the unit has no values yet: then the tensors are on meta.
    """
    if handle.on_meta:
        return {
            slot.index: torch.empty(
                slot.shape, dtype=region.layout.dtype, device="meta"
            )
            for region in handle.regions
            for slot in region.layout.parameters
        }
    shards = [on_device(handle, region.shard) for region in handle.regions]
    fulls = gather_flat_values(handle, shards)
    return {
        slot.index: full[slot.offset : slot.offset + slot.numel]
        .view(slot.shape)
        .clone()
        for region, full in zip(handle.regions, fulls, strict=True)
        for slot in region.layout.parameters
    }


@torch.no_grad()
def gather_flat_values(handle: FlatParamHandle, shards: list[Tensor]) -> list[Tensor]:
    """Return a full ``(padded_numel,)`` for each ``(shard_numel,)`` of ``shards``.

    ``shards`` goes with the unit's regions, one to one.

    Collective: one all-gather (buffers coalesced) over the shard group; none if it has
    one rank, and then the shards themselves are returned.
    """
    group = handle.groups.shard
    if group is None:
        return shards
    size = handle.groups.shard_world_size
    fulls = [storage.new_buffer(s.numel() * size, s.dtype, s.device) for s in shards]
    filled = [i for i, s in enumerate(shards) if s.numel()]
    if filled:
        collectives.all_gather_flat(
            [fulls[i] for i in filled], [shards[i] for i in filled], group
        )
    return fulls


def part_of(
    region: FlatParameter, slot: ParameterSlot, value: Tensor, *, like: Tensor
) -> Tensor:
    """This rank's part of a full ``value``, in the shape of ``like``, its leaf."""
    start, stop = region.layout.interval(slot, region.rank)
    return value.detach().reshape(-1)[start:stop].view(like.shape)
