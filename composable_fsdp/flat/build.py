"""Building a unit's handle: the regions, and the tables that every step needs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.flat import memory, part_guards
from composable_fsdp.flat.gather_sources import EncodedShards, Pieces
from composable_fsdp.flat.gradients import new_shard, shard_views
from composable_fsdp.flat.handle import (
    FlatParamHandle,
    FullForm,
    Guards,
    ShardWrites,
    UnitLayout,
    remember_leaves,
)
from composable_fsdp.flat.memory import GatherSource
from composable_fsdp.flat.param_form import NO_FORMS, Forms, plain_leaves
from composable_fsdp.flat.region import (
    NO_DIVISION,
    FlatGradient,
    FlatParameter,
    FullBuffer,
    ReduceBuffer,
    ReduceRule,
    TrainableRegion,
    division,
    no_owner,
)
from composable_fsdp.flat.residency import UNREADABLE, written
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.unit_plan import Place, UnitPlan


def build_handle(
    target: Target,
    *,
    groups: Groups,
    device: torch.device,
    sharded: bool = False,
    rule: ReduceRule | None = None,
    guarded: Guards | None = None,
    forms: Forms = NO_FORMS,
) -> FlatParamHandle:
    """Turn a planned unit into flat buffers and leaves, in the sharded state."""
    plan, owners = target.plan, target.owners
    made = _make_layout(target, groups.rank, device, sharded, forms)
    # ``copy.deepcopy`` passes rule and guards: modules below may be partly copied.
    if guarded is None:
        guarded = part_guards.find_guards(groups, owners, target.modules, forms)
    handle = FlatParamHandle(
        made,
        make_form(made),
        groups=groups,
        rule=ReduceRule() if rule is None else rule,
        guards=guarded,
        writes=ShardWrites(
            written(made),
            () if plan.stays_full else None,
            steps_per_reduction=int(plan.parameter_ranks < plan.shard_world_size),
        ),
    )
    set_divisions(handle)
    remember_leaves(handle)
    part_guards.refuse_removals(owners)
    part_guards.refuse_part_calls(handle)
    return handle


def replace_layout(
    handle: FlatParamHandle,
    target: Target,
    *,
    origin: tuple[RegionLayout, ...],
    device: torch.device,
) -> None:
    """Give an idle and sharded unit the regions of ``target``, without hooks."""
    # A gradient that reaches a region of before is refused by the hook of its leaf.
    for region in handle.layout.trainable:
        region.reduce.owner = no_owner
    rank, forms = handle.groups.rank, handle.layout.forms
    made = _make_layout(target, rank, device, sharded=True, forms=forms, origin=origin)
    form = make_form(made)
    if form.needs_fill:
        form.arena_slot = handle.form.arena_slot
    handle.begin_layout(made, form)
    set_divisions(handle)
    remember_leaves(handle)


def _make_layout(
    target: Target,
    rank: int,
    device: torch.device,
    sharded: bool,
    forms: Forms,
    origin: tuple[RegionLayout, ...] | None = None,
) -> UnitLayout:
    """Build the regions of ``target`` over its parameters, which become the leaves."""
    plan, places, owners = target.plan, target.places, target.owners
    regions = tuple(
        [
            _build_region(layout, tuple(leaves), plan, rank, device, sharded, forms)
            for layout, leaves in zip(plan.regions, target.parameters, strict=True)
        ]
    )
    trainable = tuple([r for r in regions if isinstance(r, TrainableRegion)])
    by_dtype: dict[torch.dtype, list[TrainableRegion]] = {}
    for region in trainable:
        if region.layout.padded_numel:
            by_dtype.setdefault(region.reduce.buffer.dtype, []).append(region)
    structure = 0
    if origin and plan.regions != origin:
        # Of names and flags, equal on all ranks for equal layouts.
        members = [(r.trainable, [s.fqns for s in r.parameters]) for r in plan.regions]
        structure = zlib.crc32(repr(members).encode()) or 1
    return UnitLayout(
        plan,
        origin or plan.regions,
        structure,
        device,
        offload=plan.is_offloaded,
        on_meta=True in [region.shard.is_meta for region in regions],
        regions=regions,
        trainable=trainable,
        reduce_groups=tuple(map(tuple, by_dtype.values())),
        places=places,
        owners=owners,
        tables=tuple([owner._parameters for owner in owners]),
        keys=tuple([place.name for place in places]),
        sharded_placed=_placed(regions, places, [r.leaves for r in regions]),
        forms=forms,
    )


def _build_region(
    layout: RegionLayout,
    leaves: tuple[nn.Parameter, ...],
    plan: UnitPlan,
    rank: int,
    device: torch.device,
    sharded: bool,
    forms: Forms,
) -> FlatParameter:
    """Make ``leaves`` views of a new shard with this rank's part, and all buffers."""
    dtypes, offload = plan.options.dtypes(layout.dtype), plan.is_offloaded
    cuts = layout.shard_cuts(rank, rows=plan.options.keeps_rows)
    if True in [leaf.is_meta for leaf in leaves]:
        device = torch.device("meta")
    # The buffers must not be inference tensors, which training could not write to.
    # No torch.no_grad is needed: the parameters are detached, so autograd records
    # nothing here.
    with memory.outside_inference():
        shard = new_shard(layout.shard_numel, layout.dtype, device, offload=offload)
        if cuts.cuts.gaps:
            # A norm over the whole shard must not see undefined padding.
            shard.zero_()
        views, _ = shard_views(cuts, shard)
        for leaf, view, (start, stop, _) in zip(leaves, views, cuts.parts, strict=True):
            if stop > start and not view.is_meta:
                own = slice(None) if sharded else slice(start, stop)
                # A name for the old values would keep the last ones' memory.
                view.view(-1).copy_(leaf.data.reshape(-1)[own])
            if not sharded:
                # Setting ``.data`` keeps a ``.grad`` of the old shape, which no
                # optimizer accepts.
                leaf.grad = None
            # All empty views have address 0, so only the storage can show that a user
            # replaced ``.data`` of an empty leaf (``features.changes``).
            leaf.data = view if stop > start else torch.empty_like(view)
            # Without ``grad_dtype``, torch refuses a ``.grad`` whose dtype differs
            # from the parameter's dtype.
            if dtypes.gradient != view.dtype:
                leaf.grad_dtype = dtypes.gradient
        unshown = bytes(len(leaves))
        region = (TrainableRegion if layout.trainable else FlatParameter)(
            layout,
            leaves,
            shard,
            _make_full(
                layout, leaves, shard, dtypes.compute, rank, device, offload, forms
            ),
            FlatGradient(dtypes.gradient, unshown, unshown),
            rank,
            cuts,
            device,
            offload=offload,
            graded=leaves,
        )
        if isinstance(region, TrainableRegion):
            buffer = torch.empty(
                layout.padded_numel, dtype=dtypes.reduce, device=device
            )
            parts, gaps = full_views(layout, buffer)
            number = len(parts)
            region.reduce = ReduceBuffer(
                buffer, tuple(parts), gaps, bytearray(number), [None] * number
            )
            memory.free(buffer)
    return region


def _make_full(
    layout: RegionLayout,
    leaves: tuple[nn.Parameter, ...],
    shard: Tensor,
    dtype: torch.dtype,
    rank: int,
    device: torch.device,
    offload: bool,
    forms: Forms,
) -> FullBuffer:
    """Create a full buffer ``(padded_numel,)`` of ``dtype``, and the full leaves."""
    encoded = layout.wire is not None and layout.padded_numel > 0
    copied = dtype != layout.dtype or offload
    # A single rank encodes and decodes, too: numbers must not depend on the ranks.
    is_own = layout.world_size > 1 or copied or encoded
    buffer, own_slice = shard, None
    if is_own:
        # The caller has left inference mode.
        buffer = torch.empty(layout.padded_numel, dtype=dtype, device=device)
    if copied and not encoded:
        own_slice = buffer.narrow(0, rank * layout.shard_numel, layout.shard_numel)
    made = full_leaves(layout, full_views(layout, buffer)[0], leaves, forms)
    if is_own:
        # Views can be created only while the storage has memory. The views stay valid
        # when the storage is resized to 0.
        memory.free(buffer)
    return FullBuffer(buffer, own_slice, is_own, tuple(made))


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


def _placed(
    regions: Sequence[FlatParameter],
    places: tuple[Place, ...],
    leaves: Sequence[tuple[nn.Parameter, ...]],
) -> tuple[nn.Parameter, ...]:
    """Return the leaf of each place, given the leaves of each region."""
    # Without tied parameters each leaf has a single place.
    if len(leaves) == 1 and len(leaves[0]) == len(places):
        return leaves[0]
    slots = (s.index for r in regions for s in r.layout.parameters)
    by_slot = dict(zip(slots, chain.from_iterable(leaves), strict=True))
    return tuple([by_slot[place.slot_index] for place in places])


def _source_of(
    layout: UnitLayout, gathering: list[FlatParameter]
) -> GatherSource | None:
    """Return what all-gathers of the regions read, if not the shards."""
    if [region for region in gathering if region.layout.wire]:
        return EncodedShards(gathering)
    if layout.plan.piece_ranks and not layout.on_meta:
        return Pieces(layout.plan, gathering)
    return None


def make_form(
    layout: UnitLayout,
    unreadable: tuple[int, ...] | None = None,
    *,
    source: GatherSource | None = None,
) -> FullForm:
    """Return the full form over the regions' full buffers and leaves."""
    if unreadable is None:
        unreadable = tuple(islice(UNREADABLE, len(layout.sharded_placed)))
    gathering = [r for r in layout.regions if r.full.is_own and r.layout.padded_numel]
    fulls = [r.full.buffer for r in gathering]
    # The shard itself, if it has the compute dtype and is on the compute device. Else
    # it is first cast or copied into this rank's slice of ``full``, in place.
    pairs = [(region.full.own_slice, region.shard) for region in gathering]
    lists = fulls, [shard if own is None else own for own, shard in pairs]
    fills = tuple([(own, shard) for own, shard in pairs if own is not None])
    if source is None:
        source = _source_of(layout, gathering)
    if isinstance(source, EncodedShards):
        lists = source.lists
    elif isinstance(source, Pieces):
        fills = source.fills
    placed = _placed(
        layout.regions, layout.places, [r.full.leaves for r in layout.regions]
    )
    swaps = zip(layout.tables, layout.keys, layout.sharded_placed, placed, strict=True)
    return FullForm(
        placed,
        tuple(swaps),
        lists,
        fulls,
        fills,
        bool(gathering),
        unreadable,
        source=source,
    )


def set_divisions(handle: FlatParamHandle) -> None:
    """Compute how each region's sums are divided, from the unit's rule."""
    rule, ranks = handle.rule, handle.groups.world_size
    # NCCL can average; gloo and CPU tensors can only sum.
    average = (
        handle.layout.device.type == "cuda"
        and handle.groups.can_average
        and not rule.force_sum
    )
    factor = rule.factor
    # A backend that averages knows of its own ranks alone.
    if factor is None and rule.expert_ranks > 1:
        factor = float(ranks * rule.expert_ranks)
    for region in handle.layout.trainable:
        region.reduce.division = NO_DIVISION
        if rule.hook is None:
            dtype = region.reduce.buffer.dtype
            region.reduce.division = division(factor, dtype, ranks, average)


def renew_full_leaves(
    handle: FlatParamHandle,
) -> list[tuple[nn.Parameter, nn.Parameter, nn.Parameter]]:
    """Give the unit new full leaves without hooks; return (old, new, sharded)."""
    found: list[tuple[nn.Parameter, nn.Parameter, nn.Parameter]] = []
    for region in handle.layout.regions:
        full, layout = region.full, region.layout
        made = full_leaves(
            layout,
            full_views(layout, full.buffer)[0],
            region.leaves,
            handle.layout.forms,
        )
        found += zip(full.leaves, made, region.leaves, strict=True)
        region.full = full._replace(leaves=tuple(made))
    form = handle.form
    # The pieces stay: the other ranks, which may not renew theirs, use their own.
    handle.form = make_form(handle.layout, form.unreadable, source=form.source)
    return found
