"""Building a region: the flat buffers, and the leaves that view the buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from composable_fsdp.flat import memory
from composable_fsdp.flat.gradients import new_shard, shard_views
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.options import Dtypes


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
) -> FlatParameter:
    """Copy this rank's part of ``parameters`` into a new shard and create all views.

    Afterwards each tensor in ``parameters`` is its own sharded leaf: the same object,
    with ``.data`` a view of ``shard`` and, unless ``sharded``, no ``.grad``.

    Args:
        layout: the planned region.
        parameters: the full parameters in slot order; this rank's parts if ``sharded``.
        rank: this rank's index in the shard group.
        rows: whether sharded leaves keep whole rows of dim 0; else sharded leaves are
            1-D.
        device: the compute device. Ignored if a parameter is on meta.
        dtypes: the compute, reduce and gradient dtypes of the region.
        offload: keep the shard in host memory. ``full`` is then a separate buffer, even
            if the shard group has one rank. Default: False.
        sharded: ``parameters`` hold only this rank's elements already. Default: False.

    Returns: the region.
    Collective: none.
    """
    region = FlatParameter()
    region.layout, region.rank = layout, rank
    region.temporary = region.in_flight = region.partial = region.flat = None
    region.grad_places, region.owned = (), {}
    region.cuts = layout.shard_cuts(rank, rows=rows)
    meta = any(p.is_meta for p in parameters)
    region.device = torch.device("meta") if meta else device
    region.offload = offload
    region.shard = new_shard(region, layout.dtype)
    region.grad_dtype = dtypes.gradient
    # The buffers must not be inference tensors, which training could not write to.
    # No torch.no_grad is needed: the parameters are detached, so autograd records
    # nothing here.
    with memory.outside_inference():
        _fill_shard(region, parameters, sharded=sharded)
        _make_sharded_leaves(region, parameters, sharded=sharded)
        make_full(region, dtypes.compute)
        _make_gradients(region, dtypes.reduce)
    return region


def _fill_shard(
    region: FlatParameter,
    parameters: Sequence[nn.Parameter],
    *,
    sharded: bool,
) -> None:
    """Copy this rank's elements of ``parameters`` into the shard; zero the padding."""
    shard = region.shard
    if shard.is_meta:
        return
    parts, cuts, _ = region.cuts
    if cuts.gaps:
        # A norm over the whole shard must not see undefined padding.
        shard.zero_()
    for parameter, (start, stop, at) in zip(parameters, parts, strict=True):
        if stop > start:
            source = parameter.detach().reshape(-1)
            if not sharded:
                source = source[start:stop]
            shard[at : at + stop - start].copy_(source)


def _make_sharded_leaves(
    region: FlatParameter,
    parameters: Sequence[nn.Parameter],
    *,
    sharded: bool,
) -> None:
    """Make ``parameters`` the sharded leaves: views of the shard."""
    views, _ = shard_views(region, region.shard)
    for parameter, view in zip(parameters, views, strict=True):
        if not sharded:
            # Setting ``.data`` keeps a ``.grad`` of the old shape, which no optimizer
            # accepts.
            parameter.grad = None
        parameter.data = own_memory(view)
        # Without ``grad_dtype``, torch refuses a ``.grad`` whose dtype differs from the
        # parameter's dtype.
        if region.grad_dtype != view.dtype:
            parameter.grad_dtype = region.grad_dtype
    region.leaves = tuple(parameters)
    slots = region.layout.parameters
    region.absent = tuple(
        [i for i, view in enumerate(views) if slots[i].numel and not view.numel()]
    )
    region.arrived = bytearray(len(parameters))
    region.shown = region.unshown = bytes(len(parameters))
    region.waiting = [None] * len(parameters)


def own_memory(view: Tensor) -> Tensor:
    """Return ``view``, or an empty tensor with its own storage if ``view`` is empty."""
    # All empty views have address 0, so only the storage can show that a user replaced
    # ``.data`` of an empty leaf (``external_changes``).
    return view if view.numel() else torch.empty_like(view)


def make_full(region: FlatParameter, dtype: torch.dtype) -> None:
    """Create ``full`` ``(padded_numel,)`` of ``dtype`` and its full leaves.

    ``full`` has no memory afterwards, unless ``full`` is the shard itself.
    """
    layout = region.layout
    region.is_cut = layout.world_size > 1 or dtype != layout.dtype or region.offload
    if region.is_cut:
        region.full = memory.new_buffer(layout.padded_numel, dtype, region.device)
    else:
        region.full = region.shard
    region.own_slice = None
    if dtype != layout.dtype or region.offload:
        start = region.rank * layout.shard_numel
        region.own_slice = region.full[start : start + layout.shard_numel]
    parts, _ = full_views(layout, region.full)
    region.full_leaves = tuple(
        full_leaf(part, leaf, trainable=layout.trainable)
        for part, leaf in zip(parts, region.leaves, strict=True)
    )
    if region.is_cut:
        # Views can be created only while the storage has memory. The views stay valid
        # when the storage is resized to 0.
        memory.free(region.full)


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
    parts = [
        pieces[i] if len(slot.shape) == 1 else pieces[i].view(slot.shape).data
        for i, slot in zip(cuts.parameters, layout.parameters, strict=True)
    ]
    return parts, tuple([pieces[i] for i in cuts.gaps])


def full_leaf(part: Tensor, leaf: nn.Parameter, *, trainable: bool) -> nn.Parameter:
    """Turn a view of ``full`` into a parameter with the original's type and attributes.

    Args:
        part: the parameter's view from ``full_views``. Converted in place for a plain
            ``nn.Parameter``.
        leaf: the original parameter.
        trainable: the region's flag. A later change of ``leaf.requires_grad`` then
            shows as a difference between ``leaf`` and the full leaf.

    Returns: the full leaf, which shares ``__dict__`` with ``leaf``.
    Collective: none.
    """
    made: nn.Parameter
    if type(leaf) is nn.Parameter:
        made = part  # type: ignore[assignment]  # from the next line on
        # Torch's lazy parameters change their class in the same way.
        # ``nn.Parameter(part)`` would create one more tensor.
        made.__class__ = nn.Parameter
        made.requires_grad = trainable
    else:
        made = torch.Tensor._make_subclass(type(leaf), part, trainable)
    # Shared, so that an attribute that a user sets on either leaf is visible on both.
    made.__dict__ = leaf.__dict__
    return made


def _make_gradients(region: FlatParameter, reduce_dtype: torch.dtype) -> None:
    """Create ``reduce_buffer`` ``(padded_numel,)`` and its views, without memory."""
    layout = region.layout
    region.reduce_buffer = region.grad_shard = None
    region.reduce_views = region.grad_views = ()
    region.gaps = region.grad_gaps = ()
    if not layout.trainable:
        return
    buffer = memory.new_buffer(layout.padded_numel, reduce_dtype, region.device)
    region.reduce_buffer = buffer
    views, region.gaps = full_views(layout, buffer)
    region.reduce_views = tuple(views)
    memory.free(buffer)
