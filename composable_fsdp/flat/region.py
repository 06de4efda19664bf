"""One region of a unit: its buffers, and the leaves that view them.

::

    shard          (shard_numel,)   always     <- sharded leaves, the originals
    full           (padded_numel,)  unshard..  <- full leaves, which compute sees
    reduce_buffer  (padded_numel,)  backward   <- gradients, moved when all are there
    grad_shard     (shard_numel,)   till clear <- ``.grad`` of the sharded leaves

Views are made once, at build; those of ``grad_shard`` with it (``gradients``). A full
leaf has a version counter of its own: an all-gather into ``full`` does not invalidate
what autograd saved (the values are the same again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat import memory
from composable_fsdp.flat.reduce_rule import Division
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.options import Dtypes


class FlatParameter:
    """A region at run time, built by ``build_region``."""

    __slots__ = (
        "__weakref__",
        "absent",
        "arrived",
        "division",
        "device",
        "flat",
        "full",
        "full_leaves",
        "gaps",
        "grad_dtype",
        "grad_gaps",
        "grad_places",
        "grad_shard",
        "grad_views",
        "has_tensor_hooks",
        "in_flight",
        "is_cut",
        "layout",
        "leaves",
        "offload",
        "own_slice",
        "owned",
        "owner",
        "partial",
        "rank",
        "reduce_buffer",
        "reduce_views",
        "shard",
        "shown",
        "temporary",
        "unshown",
        "waiting",
    )

    layout: RegionLayout
    rank: int
    is_cut: bool
    """Whether ``full`` has memory of its own; else it is ``shard``."""
    device: torch.device
    """Where ``full`` and ``reduce_buffer`` are."""
    offload: bool
    """Whether ``shard`` and ``grad_shard`` are on the host, pinned for a GPU."""
    shard: Tensor
    full: Tensor
    own_slice: Tensor | None
    """This rank's slice of ``full``, ``(shard_numel,)``, where the shard is copied into
    it before the gather: cast, or from the host. Else the shard itself is gathered."""
    owner: Callable[[], Any]
    """The state of the unit, weakly; for the hooks of ``full_leaves``."""
    leaves: tuple[nn.Parameter, ...]
    absent: tuple[int, ...]
    """Numbers of the leaves that have no element here, and have some on other ranks."""
    full_leaves: tuple[nn.Parameter, ...]
    reduce_buffer: Tensor | None
    reduce_views: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]
    """Views of the padding in ``reduce_buffer``."""
    grad_dtype: torch.dtype
    """Dtype of ``grad_shard``: the parameters', unless low precision is kept."""
    grad_shard: Tensor | None
    grad_views: tuple[Tensor | None, ...]
    """What the leaves show: views of ``grad_shard``, and ``None`` for an absent one."""
    grad_gaps: tuple[Tensor, ...]
    """Views of the padding in ``grad_shard``."""
    grad_places: tuple[int, ...]
    """Addresses of both: a user can give one other data."""
    shown: bytes
    """Per parameter: 1 if its part of ``grad_shard`` was a gradient, which somebody may
    have kept."""
    unshown: bytes
    """What ``shown`` is at first: zeros."""
    flat: nn.Parameter | None
    """``shard`` as one parameter, if it was handed out (``flat_parameter``): then the
    flat gradient is its ``.grad``, and the leaves have none."""
    arrived: bytearray
    """Per parameter: 1 if a gradient has come that was not reduced yet."""
    waiting: list[Tensor | None]
    """Per parameter: its gradient as autograd made it, until it is in
    ``reduce_buffer``."""
    has_tensor_hooks: bool
    """Whether a leaf has hooks of the user that see its gradient; of this reduction."""
    division: Division
    """How sums over ranks become averages."""
    partial: Tensor | None
    """``(shard_numel,)`` in the reduce dtype: sums of earlier reductions that were not
    taken over the replicas yet; see ``set_requires_all_reduce``."""
    temporary: Tensor | None
    """Where a reduction writes while ``grad_shard`` still holds earlier gradients, or
    is on the host."""
    in_flight: bytearray | None
    """Offloaded, while a copy to ``grad_shard`` is on its way: per parameter, 1 if its
    part will be a gradient. Nobody on the host may touch ``grad_shard`` then."""
    owned: dict[int, Tensor]
    """Then, too: gradients that are tensors of the user, by the parameter's number."""

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"FlatParameter({len(self.leaves)} parameters, {layout.dtype}, numel "
            f"{layout.numel}, padded_numel {layout.padded_numel}, shard_numel "
            f"{layout.shard_numel}, rank {self.rank})"
        )


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
    """Copy this rank's part of ``parameters`` into a shard and make every view.

    ``device`` computes; with ``offload`` the shard is on the host, and ``full`` has
    memory of its own also where one rank holds everything. With ``sharded`` the
    ``parameters`` are this rank's part already, in memory of their own.

    Afterwards each of ``parameters`` (in slot order) is its own sharded leaf: the same
    object, its data a view of ``shard``, its ``.grad`` cleared unless it was sharded.
    Sends nothing.
    """
    region = FlatParameter()
    region.layout, region.rank = layout, rank
    region.temporary = region.in_flight = region.partial = region.flat = None
    region.grad_places, region.owned = (), {}
    meta = any(p.is_meta for p in parameters)
    region.device = torch.device("meta") if meta else device
    region.offload = offload
    region.shard = _new_shard(region, layout.dtype)
    region.grad_dtype = dtypes.gradient
    # Nothing here is recorded: the parameters are detached, and all else is made here.
    with memory.outside_inference():
        _fill_shard(region, parameters, rows=rows, sharded=sharded)
        _make_sharded_leaves(region, parameters, rows=rows, sharded=sharded)
        make_full(region, dtypes.compute)
        _make_gradients(region, dtypes.reduce)
    return region


def _new_shard(region: FlatParameter, dtype: torch.dtype) -> Tensor:
    """An uninitialised ``(shard_numel,)`` where shards live."""
    numel, device = region.layout.shard_numel, region.device
    if not region.offload or device.type == "meta":
        return memory.new_buffer(numel, dtype, device)
    # Only from pinned memory do copies run beside the CPU and the GPU's compute.
    pinned = device.type == "cuda"
    return memory.new_buffer(numel, dtype, torch.device("cpu"), pinned=pinned)


def _fill_shard(
    region: FlatParameter,
    parameters: Sequence[nn.Parameter],
    *,
    rows: bool,
    sharded: bool,
) -> None:
    shard = region.shard
    if shard.is_meta:
        return
    parts, cuts, _ = region.layout.shard_cuts(region.rank, rows=rows)
    if cuts.gaps:
        # Padding is zero, so that a norm of the whole shard means something.
        shard.zero_()
    for parameter, (start, stop, at) in zip(parameters, parts, strict=True):
        if stop > start:
            source = parameter.detach().reshape(-1)
            if not sharded:
                source = source[start:stop]
            shard[at : at + stop - start].copy_(source)


def shard_views(
    region: FlatParameter, base: Tensor, *, rows: bool
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Views of a ``(shard_numel,)`` buffer: this rank's leaves, and padding."""
    _, cuts, shapes = region.layout.shard_cuts(region.rank, rows=rows)
    # One operation for all pieces, where slices would take one each.
    pieces = base.split_with_sizes(cuts.sizes)
    parts = [
        pieces[i] if len(shape) == 1 else pieces[i].view(shape)
        for i, shape in zip(cuts.parameters, shapes, strict=True)
    ]
    return parts, tuple([pieces[i] for i in cuts.gaps])


def _make_sharded_leaves(
    region: FlatParameter,
    parameters: Sequence[nn.Parameter],
    *,
    rows: bool,
    sharded: bool,
) -> None:
    views, _ = shard_views(region, region.shard, rows=rows)
    for parameter, view in zip(parameters, views, strict=True):
        if not sharded:
            # ``.data =`` keeps a ``.grad`` of the old shape, which no optimizer could
            # use.
            parameter.grad = None
        parameter.data = own_memory(view)
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
    """``view`` of the shard for a leaf; an empty one with an empty storage of its own.

    Empty views have no address, by which other data of the leaf could be told.
    """
    return view if view.numel() else torch.empty_like(view)


def make_full(region: FlatParameter, dtype: torch.dtype) -> None:
    """Give the region a ``full`` ``(padded_numel,)`` of ``dtype``, leaves included.

    It has no memory afterwards, unless it is the shard itself.
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
        # A view can only be made of memory that is there; it outlives the memory.
        memory.free(region.full)


def full_views(
    layout: RegionLayout, buffer: Tensor
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The parts of a ``(padded_numel,)`` buffer: parameters, and padding.

    They have its memory, but autograd does not know it: each has a version counter of
    its own, which is what makes the split *unsafe*, and nothing that the collector has
    to look into.
    """
    cuts = layout.cuts
    pieces = buffer.unsafe_split_with_sizes(cuts.sizes)
    parts = [
        pieces[i] if len(slot.shape) == 1 else pieces[i].view(slot.shape).data
        for i, slot in zip(cuts.parameters, layout.parameters, strict=True)
    ]
    return parts, tuple([pieces[i] for i in cuts.gaps])


def full_leaf(part: Tensor, leaf: nn.Parameter, *, trainable: bool) -> nn.Parameter:
    """Make ``part``, one of ``full_views``, a parameter with the original's attributes.

    It is trainable as its region is, so that a change of the original's
    ``requires_grad`` shows as a difference.
    """
    made: nn.Parameter
    if type(leaf) is nn.Parameter:
        made = part  # type: ignore[assignment]  # from the next line on
        made.__class__ = nn.Parameter  # as torch's lazy parameters do
        made.requires_grad = trainable
    else:
        made = torch.Tensor._make_subclass(type(leaf), part, trainable)
    # One dict for both: what a user sets on the parameter is seen in forward, and back.
    made.__dict__ = leaf.__dict__
    return made


def _make_gradients(region: FlatParameter, reduce_dtype: torch.dtype) -> None:
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


def make_grad_shard(region: FlatParameter, *, rows: bool) -> None:
    """Make ``grad_shard`` ``(shard_numel,)`` and its views, for a reduction.

    Not at build: between build and backward the memory is the optimizer's and the
    activations'. Values are undefined.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            make_grad_shard(region, rows=rows)
        return
    if region.offload:
        shard = _new_shard(region, region.grad_dtype)
    else:
        # Once per step and unit, so with no call around it.
        numel, device = region.layout.shard_numel, region.device
        shard = torch.empty(numel, dtype=region.grad_dtype, device=device)
    views, region.grad_gaps = shard_views(region, shard, rows=rows)
    region.shown = region.unshown
    region.grad_places = (*map(Tensor.data_ptr, (shard, *views)),)
    region.grad_shard = shard
    region.grad_views = with_absent(region, views) if region.absent else tuple(views)


def with_absent(
    region: FlatParameter, gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """``gradients`` of the leaves, ``None`` for those that have no element here.

    As with FSDP1: of an empty gradient a mean would be NaN, and a maximum an error.
    """
    shown = list(gradients)
    for index in region.absent:
        shown[index] = None
    return tuple(shown)
