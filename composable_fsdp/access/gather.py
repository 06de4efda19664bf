"""Collectives outside the step, between flat shards and full buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef


@torch.no_grad()
def gather_flat_values(
    handle: FlatParamHandle, shards: list[Tensor], *, first_only: bool = False
) -> list[Tensor]:
    """Return the full ``(padded_numel,)`` of each ``(shard_numel,)`` in ``shards``.

    Collective: an all-gather of all buffers; with ``first_only`` a gather of each.
    """
    group, size = handle.groups.shard, handle.groups.shard_world_size
    if group is None:
        return shards
    # Other ranks allocate nothing, so that rank0_only saves their memory.
    wanted = not first_only or handle.groups.rank == 0
    fulls = [
        memory.new_buffer(s.numel() * size if wanted else 0, s.dtype, s.device)
        for s in shards
    ]
    # A region without elements has nothing to send on any rank.
    filled = [i for i, s in enumerate(shards) if s.numel()]
    if first_only:
        for i in filled:
            full = fulls[i] if wanted else None
            collectives.at_first_rank("gather", full, shards[i], group)
        return fulls if wanted else []
    if filled:
        collectives.all_gather_flat(
            [fulls[i] for i in filled], [shards[i] for i in filled], group
        )
    return fulls


def shards_of(
    handle: FlatParamHandle, found: Sequence[tuple[ParamRef, Tensor | None]]
) -> list[Tensor]:
    """Return per region ``(shard_numel,)`` with the values; empty without any."""
    shards = []
    for region in handle.layout.regions:
        here = [(ref, value) for ref, value in found if ref.region is region]
        given = [(ref, value) for ref, value in here if value is not None]
        # The dtype of a state may differ from the dtype of the parameters.
        dtype = given[0][1].dtype if given else region.layout.dtype
        # ``gather_flat_values`` skips buffers without elements.
        numel = region.layout.shard_numel if here else 0
        shard = memory.new_buffer(numel, dtype, handle.layout.device).zero_()
        for ref, value in given:
            shard[ref.offset :][: value.numel()].copy_(value.reshape(-1))
        shards.append(shard)
    return shards


@torch.no_grad()
def gather_whole(
    handle: FlatParamHandle,
    shards: list[Tensor],
    refs: Sequence[ParamRef],
    *,
    first_only: bool,
    to_cpu: bool,
) -> list[Tensor]:
    """Return new whole values of ``refs``, with ``first_only`` only on the first rank.

    Collective: as ``gather_flat_values``; an all-gather per parameter that TP cuts.
    """
    # All replicas hold equal values, so a single replica gathers.
    if first_only and not handle.groups.in_first_replica:
        return []
    fulls = gather_flat_values(handle, shards, first_only=first_only)
    made = []
    for ref in refs if fulls else ():
        full, slot = fulls[handle.layout.regions.index(ref.region)], ref.slot
        part = full[slot.offset : slot.offset + slot.numel].view(slot.shape)
        value = ref.form.whole(part)
        # Copied, so that the caller's tensors do not keep the full buffer alive.
        home = "cpu" if to_cpu else value.device
        made.append(value.to(home, copy=True))
    return made


@torch.no_grad()
def gather_slot(ref: ParamRef, part: Tensor) -> Tensor:
    """Return a parameter's full value. Collective: a broadcast per rank that holds."""
    handle, slot, layout = ref.handle, ref.slot, ref.region.layout
    if part.is_meta:
        return part.new_empty(ref.shape)
    cuts = [layout.interval(slot, rank) for rank in range(layout.world_size)]
    own = gather_part(part, slot.shape, cuts, handle.groups.shard, handle.layout.device)
    # The data ranks hold equal rectangles; the last step joins the rectangles.
    return ref.form.whole(own)


@torch.no_grad()
def gather_part(
    part: Tensor,
    shape: tuple[int, ...],
    intervals: Sequence[tuple[int, int]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return what ranks hold as ``intervals``. Collective: a broadcast per holder."""
    if group is None:
        return part.to(device, copy=True).view(shape)
    whole = memory.new_buffer(prod(shape), part.dtype, device)
    for rank, (start, stop) in enumerate(intervals):
        if start == stop:
            continue
        piece = whole[start:stop]
        if rank == group.rank():
            piece.copy_(part.reshape(-1))
        # An all-gather would need parts of equal sizes.
        collectives.broadcast(piece, group, rank=rank)
    return whole.view(shape)
