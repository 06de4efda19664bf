"""Building a unit's handle: the regions, and the tables that every step needs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.flat import part_guards
from composable_fsdp.flat.build_region import (
    build_region,
    fills_of,
    full_leaves,
    full_views,
)
from composable_fsdp.flat.gather_sources import EncodedShards, Pieces
from composable_fsdp.flat.handle import (
    FlatParamHandle,
    FullForm,
    Guards,
    LeafMemory,
    ShardWrites,
    UnitLayout,
    remember_leaves,
)
from composable_fsdp.flat.memory import GatherSource
from composable_fsdp.flat.param_form import NO_FORMS, Forms
from composable_fsdp.flat.region import (
    FlatParameter,
    ReduceRule,
    TrainableRegion,
    division,
    no_owner,
)
from composable_fsdp.flat.residency import (
    count_flat_writes,
    make_readable,
    unreadable_versions,
    written,
)
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.unit_plan import Place, UnitPlan

_on_meta = attrgetter("shard.is_meta")


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
    made = _make_layout(
        target.plan,
        target.parameters,
        target.places,
        target.owners,
        rank=groups.rank,
        device=device,
        sharded=sharded,
        forms=forms,
    )
    # ``copy.deepcopy`` passes rule and guards: modules below may be partly copied.
    if rule is None:
        rule = ReduceRule()
    if guarded is None:
        guarded = part_guards.find_guards(
            groups, target.owners, target.modules, forms=forms
        )
    handle = FlatParamHandle(
        made,
        make_form(made),
        groups=groups,
        rule=rule,
        guards=guarded,
        writes=ShardWrites(
            leaf_memory(made),
            written(made),
            make_readable,
            () if made.plan.stays_full else None,
            steps_per_reduction=int(
                made.plan.parameter_ranks < made.plan.shard_world_size
            ),
        ),
    )
    set_divisions(handle)
    remember_leaves(handle)
    part_guards.refuse_removals(handle)
    part_guards.refuse_part_calls(handle)
    return handle


def replace_layout(
    handle: FlatParamHandle,
    plan: UnitPlan,
    parameters: Sequence[Sequence[nn.Parameter]],
    places: tuple[Place, ...],
    owners: tuple[nn.Module, ...],
    *,
    origin: tuple[RegionLayout, ...],
    device: torch.device,
) -> None:
    """Give an idle and sharded unit new regions over ``parameters``, without hooks."""
    # A gradient that reaches a region of before is refused by the hook of its leaf.
    for region in handle.layout.trainable:
        region.reduce.owner = no_owner
    made = _make_layout(
        plan,
        parameters,
        places,
        owners,
        rank=handle.groups.rank,
        device=device,
        sharded=True,
        forms=handle.layout.forms,
        origin=origin,
    )
    form = make_form(made)
    if form.needs_fill:
        form.arena_slot = handle.form.arena_slot
    handle.begin_layout(made, form, leaf_memory(made))
    count_flat_writes(handle)
    set_divisions(handle)
    remember_leaves(handle)


def _make_layout(
    plan: UnitPlan,
    parameters: Sequence[Sequence[nn.Parameter]],
    places: tuple[Place, ...],
    owners: tuple[nn.Module, ...],
    *,
    rank: int,
    device: torch.device,
    sharded: bool,
    forms: Forms,
    origin: tuple[RegionLayout, ...] | None = None,
) -> UnitLayout:
    """Build the regions of ``plan`` over ``parameters``, which become the leaves."""
    options = plan.options
    rows, offload = options.keeps_rows, plan.is_offloaded
    regions = tuple(
        [
            build_region(
                layout,
                leaves,
                rank=rank,
                rows=rows,
                device=device,
                dtypes=options.dtypes(layout.dtype),
                offload=offload,
                sharded=sharded,
                forms=forms,
            )
            for layout, leaves in zip(plan.regions, parameters, strict=True)
        ]
    )
    trainable = tuple([r for r in regions if isinstance(r, TrainableRegion)])
    return UnitLayout(
        plan,
        origin or plan.regions,
        0 if not origin or plan.regions == origin else _checksum(plan.regions),
        device,
        offload=offload,
        on_meta=any(map(_on_meta, regions)),
        regions=regions,
        trainable=trainable,
        reduce_groups=_reduced_together(trainable),
        places=places,
        owners=owners,
        tables=tuple([owner._parameters for owner in owners]),
        keys=tuple([place.name for place in places]),
        sharded_placed=_placed(regions, places, [r.leaves for r in regions]),
        forms=forms,
    )


def leaf_memory(layout: UnitLayout) -> LeafMemory:
    """Return where the data of every leaf is, for ``shards_are_unchanged``."""
    here: list[nn.Parameter] = []
    empty: list[nn.Parameter] = []
    addresses: list[int] = []
    for region in layout.regions:
        begin, size = region.shard.data_ptr(), region.shard.element_size()
        # From the cuts, which equal units share, and not from each leaf.
        parts = region.cuts.parts
        pairs = [*zip(region.leaves, parts, strict=True)]
        here += [leaf for leaf, (start, stop, _) in pairs if stop > start]
        # Of fake tensors, ``begin`` is 0 and the address is the offset.
        addresses += [begin + at * size for start, stop, at in parts if stop > start]
        empty += [leaf for leaf, (start, stop, _) in pairs if stop == start]
    # An empty tensor has no address (``data_ptr()`` is 0), so leaves without elements
    # are compared by their storage.
    return LeafMemory(
        tuple(here),
        tuple(addresses),
        tuple(empty),
        # Strong references: if a storage were freed, a new storage could get the same
        # id.
        tuple([leaf.untyped_storage() for leaf in empty]),
    )


def _checksum(layouts: Sequence[RegionLayout]) -> int:
    """Return a checksum of names and flags, equal on all ranks for equal layouts."""
    members = [(r.trainable, [s.fqns for s in r.parameters]) for r in layouts]
    return zlib.crc32(repr(members).encode()) or 1


def _reduced_together(
    trainable: tuple[TrainableRegion, ...],
) -> tuple[tuple[TrainableRegion, ...], ...]:
    """Return the trainable regions with elements, grouped by reduce dtype."""
    by_dtype: dict[torch.dtype, list[TrainableRegion]] = {}
    for region in trainable:
        if region.layout.padded_numel:
            by_dtype.setdefault(region.reduce.buffer.dtype, []).append(region)
    return tuple(map(tuple, by_dtype.values()))


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


def make_form(
    layout: UnitLayout,
    unreadable: tuple[int, ...] | None = None,
    *,
    source: GatherSource | None = None,
) -> FullForm:
    """Return the full form over the regions' full buffers and leaves."""
    if unreadable is None:
        unreadable = unreadable_versions(len(layout.sharded_placed))
    gathering = [r for r in layout.regions if r.full.is_own and r.layout.padded_numel]
    # The shard itself, if it has the compute dtype and is on the compute device. Else
    # it is first cast or copied into this rank's slice of ``full``, in place.
    inputs = [_gathered_from(r) for r in gathering]
    fulls = [r.full.buffer for r in gathering]
    wires = [r.full.wire for r in gathering]
    outputs = fulls
    # The same list without wire formats: a full buffer that is replaced must be
    # replaced in both.
    if any(wires):
        outputs = [
            wire.buffer if wire else full
            for wire, full in zip(wires, fulls, strict=True)
        ]
        source = EncodedShards()
    elif source is None and layout.plan.piece_ranks and not layout.on_meta:
        source = Pieces(layout.plan, gathering)
    leaves = [r.full.leaves for r in layout.regions]
    placed = _placed(layout.regions, layout.places, leaves)
    swaps = zip(layout.tables, layout.keys, layout.sharded_placed, placed, strict=True)
    return FullForm(
        placed,
        tuple(swaps),
        (outputs, inputs),
        fulls,
        source.fills if isinstance(source, Pieces) else fills_of(gathering),
        bool(gathering),
        unreadable,
        source=source,
    )


def _gathered_from(region: FlatParameter) -> Tensor:
    """Return the input of the region's all-gather."""
    full = region.full
    # In place, as with a cast: the input is a slice of the output.
    if full.wire is not None:
        return full.wire.own
    return region.shard if full.own_slice is None else full.own_slice


def set_divisions(handle: FlatParamHandle) -> None:
    """Compute how each region's sums are divided, from the unit's rule."""
    rule, ranks = handle.rule, handle.groups.world_size
    # NCCL can average; gloo and CPU tensors can only sum.
    average = (
        handle.layout.device.type == "cuda"
        and handle.groups.can_average
        and not rule.force_sum
    )
    for region in handle.layout.trainable:
        dtype = region.reduce.buffer.dtype
        region.reduce.division = division(rule, dtype, ranks=ranks, can_average=average)


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
