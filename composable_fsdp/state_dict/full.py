"""Between shards and full values of one unit: gather, and cut out a rank's part."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.flat import storage
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter
from composable_fsdp.planning.layout import ParameterSlot


@torch.no_grad()
def gather_unit(
    handle: FlatParamHandle, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return the unit's full parameters by slot index, in the shards' dtype.

    The tensors are new and of the plain model's shapes. Holds one unit's buffers
    besides. ``first_only``: nothing on the other ranks.

    Collective: as ``gather_flat_values``.
    """
    shards = [region.shard for region in handle.regions]
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


@torch.no_grad()
def gather_flat_values(
    handle: FlatParamHandle, shards: list[Tensor], *, first_only: bool = False
) -> list[Tensor]:
    """Return a full ``(padded_numel,)`` for each ``(shard_numel,)`` of ``shards``.

    ``shards`` goes with the unit's regions, one to one. ``first_only``: an empty list
    on all ranks but the first, which allocate nothing.

    Collective: one all-gather (buffers coalesced) over the shard group; with
    ``first_only`` one gather per buffer over the first replica's shard group. None if
    it has one rank, and then the shards themselves are returned.
    """
    groups = handle.groups
    group, size = groups.shard, groups.shard_world_size
    if first_only and not groups.in_first_replica:
        return []
    if group is None:
        return shards
    wanted = not first_only or groups.rank == 0
    fulls = [
        storage.new_buffer(s.numel() * size if wanted else 0, s.dtype, s.device)
        for s in shards
    ]
    filled = [i for i, s in enumerate(shards) if s.numel()]
    if first_only:
        for i in filled:
            collectives.gather_flat(fulls[i] if wanted else None, shards[i], group)
        return fulls if wanted else []
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
