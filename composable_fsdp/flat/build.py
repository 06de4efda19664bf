"""Building a unit's handle: its regions, and what every step needs, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from composable_fsdp.comm.device import StreamEvent
from composable_fsdp.comm.groups import Groups
from composable_fsdp.config import Block
from composable_fsdp.flat import part_guards
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle, remember_leaves
from composable_fsdp.flat.reduce_rule import ReduceRule, division
from composable_fsdp.flat.region import FlatParameter, build_region
from composable_fsdp.flat.versions import unreadable_versions
from composable_fsdp.phases import Phase
from composable_fsdp.planning.planner import Target


def build_handle(
    target: Target,
    *,
    groups: Groups,
    device: torch.device,
    sharded: bool = False,
    guarded: tuple[dict[int, Any], ...] | None = None,
) -> FlatParamHandle:
    """Turn a planned unit into buffers and leaves; its parameters are sharded then.

    One unit at a time, so the memory above the shards is that of one unit. With
    ``sharded`` the parameters are this rank's parts already. ``guarded``: the guards,
    where the modules are not whole enough to look for them. Sends nothing.
    """
    options = target.plan.options
    handle = FlatParamHandle()
    handle.plan, handle.groups, handle.device = target.plan, groups, device
    handle.origin, handle.epoch = target.plan.regions, 0
    handle.forward_log = handle.backward_log = handle.reduce_log = None
    handle.fqn = handle.full_fqn = target.plan.fqn
    handle.rows = options.block is Block.ROW
    handle.offload = bool(options.cpu_offload and options.cpu_offload.offload_params)
    regions = []
    for layout, parameters in zip(target.plan.regions, target.parameters, strict=True):
        regions.append(
            build_region(
                layout,
                parameters,
                rank=groups.rank,
                rows=handle.rows,
                device=device,
                dtypes=options.dtypes(layout.dtype),
                offload=handle.offload,
                sharded=sharded,
            )
        )
    handle.regions = tuple(regions)
    handle.places, handle.owners = target.places, target.owners
    handle.keys = target.keys
    handle.rule = ReduceRule()
    make_tables(handle)
    set_divisions(handle)
    reset_handle(handle)
    remember_leaves(handle)
    if guarded is None:
        guarded = part_guards.find_guards(handle, target.modules)
    handle.guards = guarded
    part_guards.refuse_part_calls(handle)
    handle.written_at_build = written(handle)
    return handle


_version = attrgetter("_version")


def written(handle: FlatParamHandle) -> int:
    """A number that grows when a sharded leaf is written to; -1 without values."""
    return -1 if handle.on_meta else sum(map(_version, handle.sharded_placed))


def make_tables(handle: FlatParamHandle) -> None:
    """Compute once what every step needs."""
    handle.tables = tuple([owner._parameters for owner in handle.owners])
    handle.sharded_placed = place_leaves(handle, [r.leaves for r in handle.regions])
    handle.full_placed = place_leaves(handle, [r.full_leaves for r in handle.regions])
    make_gather_lists(handle)
    note_memory(handle)
    handle.on_meta = any(region.shard.is_meta for region in handle.regions)
    handle.trainable = handle.regions
    if not all(r.layout.trainable for r in handle.regions):
        handle.trainable = tuple([r for r in handle.regions if r.layout.trainable])
    handle.reduce_groups = _reduced_together(handle)
    handle.accumulators = ()
    handle.readable, handle.handed_out, handle.foreign = None, (), {}
    handle.unreadable = unreadable_versions(len(handle.full_placed))


def note_memory(handle: FlatParamHandle) -> None:
    """Note where the data of every leaf is, for ``shards_are_unchanged``."""
    here: list[nn.Parameter] = []
    absent: list[nn.Parameter] = []
    for region in handle.regions:
        for leaf in region.leaves:
            (here if leaf.numel() else absent).append(leaf)
    handle.here, handle.here_at = tuple(here), tuple([leaf.data_ptr() for leaf in here])
    # Kept alive, so that no later storage is the same object.
    memory = tuple([leaf.untyped_storage() for leaf in absent])
    handle.absent, handle.absent_in = tuple(absent), memory


def _reduced_together(
    handle: FlatParamHandle,
) -> tuple[tuple[FlatParameter, ...], ...]:
    """Trainable regions with elements, by reduce dtype."""
    dtypes = {
        region: region.reduce_buffer.dtype
        for region in handle.trainable
        if region.reduce_buffer is not None and region.layout.padded_numel
    }
    if len(dtypes) == len(handle.trainable) == 1:
        return (handle.trainable,)
    return tuple(
        tuple(r for r, dtype in dtypes.items() if dtype is each)
        for each in dict.fromkeys(dtypes.values())
    )


def place_leaves(
    handle: FlatParamHandle, leaves: Sequence[tuple[nn.Parameter, ...]]
) -> tuple[nn.Parameter, ...]:
    """The leaf at each place, from the leaves of each region."""
    if len(leaves) == 1 and len(leaves[0]) == len(handle.places):
        return leaves[0]  # each has one place
    slots = (s.index for r in handle.regions for s in r.layout.parameters)
    by_slot = dict(zip(slots, chain.from_iterable(leaves), strict=True))
    return tuple([by_slot[place.slot_index] for place in handle.places])


def make_gather_lists(handle: FlatParamHandle) -> None:
    """Note what is gathered, and from where."""
    gathering = [r for r in handle.regions if r.is_cut and r.layout.padded_numel]
    handle.needs_gather = bool(gathering)
    # Gather from the shard, if it is what compute takes and where compute is. Else it
    # is cast, or copied to the device, into our slice, and the gather is in place.
    inputs = [r.shard if r.own_slice is None else r.own_slice for r in gathering]
    handle.gather_lists = ([r.full for r in gathering], inputs)
    handle.fills = tuple(
        [(r.own_slice, r.shard) for r in gathering if r.own_slice is not None]
    )


def set_divisions(handle: FlatParamHandle) -> None:
    """Compute how each region's sums are divided, from the unit's rule."""
    rule, ranks = handle.rule, handle.groups.world_size
    average = handle.device.type == "cuda" and handle.groups.can_average
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        dtype = region.reduce_buffer.dtype
        region.division = division(rule, dtype, ranks=ranks, can_average=average)


def reset_handle(handle: FlatParamHandle) -> None:
    """Set what a unit is between steps, with events for the device it is on."""
    handle.phase = Phase.IDLE
    handle.is_full = handle.gathered = handle.retiring = False
    handle.ready = handle.other_form = None
    handle.wide = False
    handle.task, handle.pending, handle.open_calls = NO_TASK, 0, 0
    handle.tapes, handle.calls, handle.expected_calls = (), [], 0
    handle.lent = []
    handle.kept = handle.reduce_due = handle.reduce_has_memory = False
    handle.reduce_owner = handle.held = handle.full_since = None
    handle.gather_event = handle.free_event = handle.reduce_event = None
    handle.leaf_stream, handle.steps = None, 0
    if handle.device.type == "cuda":
        handle.gather_event = StreamEvent(handle.device)
        handle.free_event = StreamEvent(handle.device)
        handle.reduce_event = StreamEvent(handle.device)
