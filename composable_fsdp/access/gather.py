"""Between the flat shards of one unit's ranks and whole flat buffers, outside the step.

For values of any kind that lie as the parameters do: parameters, their gradients, an
optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.layout import ParameterSlot


@torch.no_grad()
def gather_flat_values(
    handle: FlatParamHandle, shards: list[Tensor], *, first_only: bool = False
) -> list[Tensor]:
    """Return a full ``(padded_numel,)`` for each ``(shard_numel,)`` of ``shards``.

    ``shards`` goes with the unit's regions, one to one. ``first_only``: an empty list
    on all ranks of the shard group but the first, which allocate nothing.

    Collective: one all-gather (buffers coalesced) over the shard group; with
    ``first_only`` one gather per buffer. None if the group has one rank, and then the
    shards themselves are returned.
    """
    group, size = handle.groups.shard, handle.groups.shard_world_size
    if group is None:
        return shards
    wanted = not first_only or handle.groups.rank == 0
    fulls = [
        memory.new_buffer(s.numel() * size if wanted else 0, s.dtype, s.device)
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


@torch.no_grad()
def gather_slot(
    handle: FlatParamHandle, region: FlatParameter, slot: ParameterSlot, part: Tensor
) -> Tensor:
    """Return the whole value of one parameter, of which ``part`` is this rank's.

    A new tensor of the plain model's shape, on the compute device.

    Collective: one broadcast over the shard group from each rank that holds elements,
    of those; none if the group has one rank.
    """
    group = handle.groups.shard
    if part.is_meta:
        return part.new_empty(slot.shape)
    if group is None:
        return part.to(handle.device, copy=True).view(slot.shape)
    ranks = range(group.size())
    intervals = [region.layout.interval(slot, rank) for rank in ranks]
    return gather_part(part, slot.shape, intervals, group, handle.device)


@torch.no_grad()
def gather_part(
    part: Tensor,
    shape: tuple[int, ...],
    intervals: Sequence[tuple[int, int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Return the whole tensor of which rank *r* has the elements ``intervals[r]``.

    A new tensor of ``shape`` on ``device``, where the group sends.

    Collective: one broadcast over ``group`` from each rank that holds elements.
    """
    whole = memory.new_buffer(prod(shape), part.dtype, device)
    for rank, (start, stop) in enumerate(intervals):
        if start == stop:
            continue
        piece = whole[start:stop]
        if rank == group.rank():
            piece.copy_(part.reshape(-1))
        collectives.broadcast(piece, group, rank=rank)
    return whole.view(shape)


@torch.no_grad()
def spread_flat_values(
    handle: FlatParamHandle,
    shards: Sequence[Tensor],
    fulls: Sequence[Tensor],
    *,
    from_first: bool,
) -> None:
    """Copy into each ``(shard_numel,)`` of ``shards`` this rank's slice of its full.

    ``from_first``: the slices of the first rank, which alone passes ``fulls``; replicas
    get those of the first replica. A full that is the shard itself is left alone.

    Collective: none; with ``from_first`` per buffer one scatter over the shard group
    and one broadcast over the replicas.
    """
    groups = handle.groups
    for shard, full in zip_longest(shards, fulls):
        if not shard.numel():
            continue
        # Groups send from the compute device; shards and fulls may be elsewhere.
        here = shard.to(handle.device)
        if from_first and groups.shard is not None:
            whole = None if full is None else full.to(handle.device)
            collectives.scatter_flat(here, whole, groups.shard)
        elif full is not shard:
            start = groups.rank * shard.numel()
            here.copy_(full[start : start + shard.numel()])
        if from_first and groups.replicate is not None:
            collectives.broadcast(here, groups.replicate)
        if here is not shard:
            shard.copy_(here)
