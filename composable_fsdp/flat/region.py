"""A region of a unit: flat buffers, and the leaves that view the buffers.

::

    buffer         shape            has memory           viewed by
    shard          (shard_numel,)   always               sharded leaves (originals)
    full           (padded_numel,)  while unsharded      full leaves (for compute)
    reduce_buffer  (padded_numel,)  during backward      gradients before reduction
    grad_shard     (shard_numel,)   until grads cleared  ``.grad`` of sharded leaves

The views of ``shard``, ``full`` and ``reduce_buffer`` are created once, at build. The
views of ``grad_shard`` are created together with ``grad_shard`` (``flat.gradients``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat import memory
from composable_fsdp.flat.reduce_rule import Division
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.options import Dtypes


class FlatParameter:
    """A region at run time. Created by ``build_region``."""

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
    """This rank's index in the shard group."""
    is_cut: bool
    """Whether ``full`` is a buffer of its own. If not, ``full`` is ``shard``."""
    device: torch.device
    """The device of ``full`` and ``reduce_buffer``."""
    offload: bool
    """Whether ``shard`` and ``grad_shard`` are in host memory (pinned if the compute
    device is a GPU)."""
    shard: Tensor
    full: Tensor
    own_slice: Tensor | None
    """This rank's slice ``(shard_numel,)`` of ``full``, if the shard must be cast or
    copied from the host into ``full`` before the all-gather. ``None`` if the all-gather
    reads ``shard`` directly."""
    owner: Callable[[], Any]
    """Weak reference to the unit's state, for the gradient hooks of ``full_leaves``."""
    leaves: tuple[nn.Parameter, ...]
    """The sharded leaves: the original parameters, in memory order."""
    absent: tuple[int, ...]
    """Indices of leaves that have no element on this rank but elements on other
    ranks."""
    full_leaves: tuple[nn.Parameter, ...]
    """The full leaves, aligned with ``leaves``."""
    reduce_buffer: Tensor | None
    """Unreduced gradients; ``None`` for a frozen region."""
    reduce_views: tuple[Tensor, ...]
    """The view of each parameter's gradient in ``reduce_buffer``."""
    gaps: tuple[Tensor, ...]
    """Views of the padding in ``reduce_buffer``."""
    grad_dtype: torch.dtype
    """Dtype of ``grad_shard``: the parameters' dtype, or the reduce dtype if
    ``keep_low_precision_grads`` is set."""
    grad_shard: Tensor | None
    """The reduced gradient of this rank's elements. ``None`` before the first
    reduction, and after ``.grad`` of all leaves was cleared (released at the next
    forward or reduction)."""
    grad_views: tuple[Tensor | None, ...]
    """``.grad`` of each leaf: a view of ``grad_shard``, or ``None`` for a leaf in
    ``absent``."""
    grad_gaps: tuple[Tensor, ...]
    """Views of the padding in ``grad_shard``."""
    grad_places: tuple[int, ...]
    """Addresses of ``grad_shard`` and of its views at creation. A changed address shows
    that a user replaced ``.data``."""
    shown: bytes
    """Per parameter: 1 if the parameter's view of ``grad_shard`` was set as ``.grad``,
    so that a user may hold a reference to the view."""
    unshown: bytes
    """The initial value of ``shown``: zeros."""
    flat: nn.Parameter | None
    """``shard`` as a single parameter, or ``None`` (``flat_parameter``). If set,
    ``grad_shard`` is the ``.grad`` of ``flat`` and the leaves have no ``.grad``."""
    arrived: bytearray
    """Per parameter: 1 if a gradient has arrived that was not reduced yet."""
    waiting: list[Tensor | None]
    """Per parameter: the gradient as autograd produced the gradient, until the copy
    into ``reduce_buffer``."""
    has_tensor_hooks: bool
    """Whether, in the current reduction, a leaf has tensor hooks of the user that must
    see the gradient."""
    division: Division
    """How sums over ranks become averages."""
    partial: Tensor | None
    """``(shard_numel,)`` in the reduce dtype: sums over the shard group that wait for
    the all-reduce over the replicate group (``set_requires_all_reduce``); ``None`` if
    no sums wait."""
    temporary: Tensor | None
    """Output of the reduction if the reduction cannot write into ``grad_shard``, which
    holds earlier gradients, has another dtype or is on the host."""
    in_flight: bytearray | None
    """Offloaded units only, while a device-to-host copy into ``grad_shard`` is in
    flight: per parameter, 1 if the parameter gets a gradient. The host must not read or
    write ``grad_shard`` until the copy has ended. ``None`` if no copy is in flight."""
    owned: dict[int, Tensor]
    """During the copy of ``in_flight``: by index of the parameter, gradients that are
    tensors of the user and no views of ``grad_shard``."""

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
    meta = any(p.is_meta for p in parameters)
    region.device = torch.device("meta") if meta else device
    region.offload = offload
    region.shard = _new_shard(region, layout.dtype)
    region.grad_dtype = dtypes.gradient
    # The buffers must not be inference tensors, which training could not write to.
    # No torch.no_grad is needed: the parameters are detached, so autograd records
    # nothing here.
    with memory.outside_inference():
        _fill_shard(region, parameters, rows=rows, sharded=sharded)
        _make_sharded_leaves(region, parameters, rows=rows, sharded=sharded)
        make_full(region, dtypes.compute)
        _make_gradients(region, dtypes.reduce)
    return region


def _new_shard(region: FlatParameter, dtype: torch.dtype) -> Tensor:
    """Create an uninitialised buffer ``(shard_numel,)`` on the device of the shards."""
    numel, device = region.layout.shard_numel, region.device
    if not region.offload or device.type == "meta":
        return memory.new_buffer(numel, dtype, device)
    # Copies between host and device are asynchronous only if the host memory is pinned.
    pinned = device.type == "cuda"
    return memory.new_buffer(numel, dtype, torch.device("cpu"), pinned=pinned)


def _fill_shard(
    region: FlatParameter,
    parameters: Sequence[nn.Parameter],
    *,
    rows: bool,
    sharded: bool,
) -> None:
    """Copy this rank's elements of ``parameters`` into the shard; zero the padding."""
    shard = region.shard
    if shard.is_meta:
        return
    parts, cuts, _ = region.layout.shard_cuts(region.rank, rows=rows)
    if cuts.gaps:
        # A norm over the whole shard must not see undefined padding.
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
    """Return views of a buffer that is laid out like the shard.

    Args:
        region: the region whose layout is used.
        base: the buffer ``(shard_numel,)``.
        rows: whether views keep whole rows of dim 0; else the views are 1-D.

    Returns: one view per parameter (empty if this rank has no elements), and the views
    of the padding.
    Collective: none.
    """
    _, cuts, shapes = region.layout.shard_cuts(region.rank, rows=rows)
    # One split creates all pieces; slices would need one operation each.
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
    """Make ``parameters`` the sharded leaves: views of the shard."""
    views, _ = shard_views(region, region.shard, rows=rows)
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


def make_grad_shard(region: FlatParameter, *, rows: bool) -> None:
    """Create ``grad_shard`` ``(shard_numel,)`` (values undefined) and its views."""
    # Called by reductions and not at build: between build and backward the memory is
    # free for optimizer state and activations.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            make_grad_shard(region, rows=rows)
        return
    if region.offload:
        shard = _new_shard(region, region.grad_dtype)
    else:
        # Runs once per step and unit; inlined to save a function call.
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
    """Return ``gradients`` with ``None`` for leaves without elements on this rank."""
    # FSDP1 does the same: the mean of an empty gradient is NaN, and ``max()`` raises.
    shown = list(gradients)
    for index in region.absent:
        shown[index] = None
    return tuple(shown)


def part_of(
    region: FlatParameter, slot: ParameterSlot, value: Tensor, *, like: Tensor
) -> Tensor:
    """Return this rank's part of the full ``value``, in the shape of ``like``.

    Args:
        region: the region of the parameter.
        slot: the parameter's place in the layout.
        value: the full value.
        like: the sharded parameter.

    Returns: a view of ``value`` if ``value`` is contiguous.
    Collective: none.
    """
    start, stop = region.layout.interval(slot, region.rank)
    return value.detach().reshape(-1)[start:stop].view(like.shape)
