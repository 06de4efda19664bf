"""Building a region: the flat buffers, and the leaves that view the buffers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from composable_fsdp.flat import memory
from composable_fsdp.flat.gradients import new_shard, shard_views, show_on_leaves
from composable_fsdp.flat.param_form import NO_FORMS, Forms, plain_leaves
from composable_fsdp.flat.region import (
    FlatGradient,
    FlatParameter,
    FullBuffer,
    ReduceBuffer,
    TrainableRegion,
    WireBuffer,
)
from composable_fsdp.planning.layout import RegionLayout, ShardCuts
from composable_fsdp.planning.options import Dtypes

_is_meta = attrgetter("is_meta")


def build_region(
    layout: RegionLayout,
    parameters: Sequence[nn.Parameter],
    *,
    rank: int,
    rows: bool,
    device: torch.device,
    dtypes: Dtypes,
    offload: bool = False,
    sharded: bool = False,
    forms: Forms = NO_FORMS,
) -> FlatParameter:
    """Copy this rank's part of ``parameters`` into the shard and create all views."""
    cuts = layout.shard_cuts(rank, rows=rows)
    if any(map(_is_meta, parameters)):
        device = torch.device("meta")
    leaves, numel = tuple(parameters), layout.padded_numel
    # The buffers must not be inference tensors, which training could not write to.
    # No torch.no_grad is needed: the parameters are detached, so autograd records
    # nothing here.
    with memory.outside_inference():
        if offload:
            shard = new_shard(layout.shard_numel, layout.dtype, device, offload=True)
        else:
            shard = torch.empty(layout.shard_numel, dtype=layout.dtype, device=device)
        fill_shard(shard, cuts, leaves, sharded=sharded)
        _make_sharded_leaves(shard, cuts, leaves, dtypes.gradient, sharded=sharded)
        full = make_full(
            layout,
            leaves,
            shard,
            dtypes.compute,
            rank,
            device,
            offload=offload,
            forms=forms,
        )
        kind = TrainableRegion if layout.trainable else FlatParameter
        unshown = bytes(len(leaves))
        region = kind(
            layout,
            leaves,
            shard,
            full,
            FlatGradient(dtypes.gradient, unshown, unshown),
            rank,
            cuts,
            device,
            offload=offload,
            graded=leaves,
            show=show_on_leaves,
        )
        if isinstance(region, TrainableRegion):
            buffer = torch.empty(numel, dtype=dtypes.reduce, device=device)
            parts, gaps = full_views(layout, buffer)
            number = len(parts)
            region.reduce = ReduceBuffer(
                buffer, tuple(parts), gaps, bytearray(number), [None] * number
            )
            memory.free(buffer)
    return region


def fill_shard(
    shard: Tensor,
    shard_cuts: ShardCuts,
    parameters: Sequence[nn.Parameter],
    *,
    sharded: bool,
) -> None:
    """Copy this rank's elements of ``parameters`` into the shard; zero the padding."""
    if shard.is_meta:
        return
    if shard_cuts.cuts.gaps:
        # A norm over the whole shard must not see undefined padding.
        shard.zero_()
    for parameter, (start, stop, at) in zip(parameters, shard_cuts.parts, strict=True):
        if stop > start:
            source = parameter.detach().reshape(-1)
            if not sharded:
                source = source.narrow(0, start, stop - start)
            shard.narrow(0, at, stop - start).copy_(source)


def _make_sharded_leaves(
    shard: Tensor,
    cuts: ShardCuts,
    parameters: Sequence[nn.Parameter],
    gradient_dtype: torch.dtype,
    *,
    sharded: bool,
) -> None:
    """Make ``parameters`` the sharded leaves: views of the shard."""
    views, _ = shard_views(cuts, shard)
    for parameter, view, (start, stop, _) in zip(
        parameters, views, cuts.parts, strict=True
    ):
        if not sharded:
            # Setting ``.data`` keeps a ``.grad`` of the old shape, which no optimizer
            # accepts.
            parameter.grad = None
        # All empty views have address 0, so only the storage can show that a user
        # replaced ``.data`` of an empty leaf (``features.changes``).
        parameter.data = view if stop > start else torch.empty_like(view)
        # Without ``grad_dtype``, torch refuses a ``.grad`` whose dtype differs from the
        # parameter's dtype.
        if gradient_dtype != view.dtype:
            parameter.grad_dtype = gradient_dtype


def make_full(
    layout: RegionLayout,
    leaves: tuple[nn.Parameter, ...],
    shard: Tensor,
    dtype: torch.dtype,
    rank: int,
    device: torch.device,
    *,
    offload: bool,
    forms: Forms,
) -> FullBuffer:
    """Create a full buffer ``(padded_numel,)`` of ``dtype``, and the full leaves."""
    wire = layout.wire if layout.padded_numel else None
    # A single rank encodes and decodes, too: numbers must not depend on the ranks.
    is_cut = layout.world_size > 1 or dtype != layout.dtype or offload or bool(wire)
    buffer, own_slice = shard, None
    if is_cut:
        # The caller has left inference mode.
        buffer = torch.empty(layout.padded_numel, dtype=dtype, device=device)
    if not wire and (dtype != layout.dtype or offload):
        start = rank * layout.shard_numel
        own_slice = buffer[start : start + layout.shard_numel]
    parts, _ = full_views(layout, buffer)
    made = full_leaves(layout, parts, leaves, forms)
    if is_cut:
        # Views can be created only while the storage has memory. The views stay valid
        # when the storage is resized to 0.
        memory.free(buffer)
    encoded = None
    if wire:
        row = torch.empty(layout.wire_nbytes, dtype=torch.uint8, device=device)
        size = layout.wire_nbytes // layout.world_size
        encoded = WireBuffer(row, row[rank * size : (rank + 1) * size])
        memory.free(row)
    return FullBuffer(buffer, own_slice, is_cut, tuple(made), encoded)


def full_views(
    layout: RegionLayout, buffer: Tensor
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Split a buffer ``(padded_numel,)`` into views of parameters and of padding."""
    cuts = layout.cuts
    # "Unsafe" means that autograd does not know the pieces as views, so each piece has
    # a version counter of its own: an all-gather into ``full`` does not invalidate
    # tensors that autograd saved (the gathered values are the same again). A piece also
    # has no ``_base`` that the garbage collector would have to visit.
    pieces = buffer.unsafe_split_with_sizes(cuts.sizes)
    # ``resize_`` gives a piece its shape; a view would be a second tensor, and
    # ``.data`` of the view a third.
    parts = [
        pieces[i] if shape is None else pieces[i].resize_(shape)
        for i, shape in cuts.parameters
    ]
    return parts, tuple([pieces[i] for i in cuts.gaps])


def fills_of(
    regions: Sequence[FlatParameter], pieces: Sequence[Tensor] | None = None
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return pairs of a part of ``full``, and of the shard with the values.

    With this rank's slices of ``pieces``, pairs of a part of these.
    """
    made: list[tuple[Tensor, Tensor]] = []
    for at, region in enumerate(regions):
        own = region.full.own_slice
        if own is not None:
            made.append((own if pieces is None else pieces[at], region.shard))
    return tuple(made)


def full_leaves(
    layout: RegionLayout,
    parts: Sequence[Tensor],
    leaves: Sequence[nn.Parameter],
    forms: Forms,
) -> list[nn.Parameter]:
    """Return the full leaves of a region, each in the form of its parameter."""
    if not forms:  # saves a call per parameter
        return plain_leaves(parts, leaves, trainable=layout.trainable)
    return [
        # By index and not by name: a unit may hold a name twice.
        forms[slot.index].full_leaf(part, leaf, trainable=layout.trainable)
        for slot, part, leaf in zip(layout.parameters, parts, leaves, strict=True)
    ]
