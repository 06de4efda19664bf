"""Building a unit's handle: the regions, and the tables that every step needs."""

from __future__ import annotations

from collections import OrderedDict
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
from composable_fsdp.flat.build_region import build_region
from composable_fsdp.flat.handle import (
    NO_BACKWARD,
    FlatParamHandle,
    FullForm,
    remember_leaves,
)
from composable_fsdp.flat.reduce_rule import ReduceRule, division
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.residency import unreadable_versions
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.planning.planner import Target


def build_handle(
    target: Target,
    *,
    groups: Groups,
    device: torch.device,
    sharded: bool = False,
    guarded: tuple[OrderedDict[int, Any], ...] | None = None,
) -> FlatParamHandle:
    """Turn a planned unit into flat buffers and leaves; the unit is sharded afterwards.

    Args:
        target: the plan of the unit, with its modules and parameters.
        groups: the unit's process groups.
        device: the compute device.
        sharded: the parameters hold only this rank's elements already. Default: False,
            full parameters.
        guarded: the pre-hook tables of the unit's parts. Default: None, find the tables
            in ``target.modules``.

    Returns: the handle, in the sharded state.
    Collective: none.
    """
    options = target.plan.options
    handle = FlatParamHandle()
    handle.plan, handle.groups, handle.device = target.plan, groups, device
    handle.origin, handle.epoch = target.plan.regions, 0
    # Lazy initialization assigns the logs and the FQN from the root.
    handle.forward_log = handle.backward_log = handle.reduce_log = None
    handle.fqn = handle.full_fqn = target.plan.fqn
    handle.rows = options.block is Block.ROW
    handle.offload = bool(options.cpu_offload and options.cpu_offload.offload_params)
    # Units are built in sequence, so the memory above the shards is at most that of a
    # single unit's full parameters.
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
    # Not in ``reset_handle``, because a rebuilt unit is kept as before.
    handle.gathered_at = None
    remember_leaves(handle)
    # ``rebuild_for_requires_grad`` passes the tables, because its ``Target`` has no
    # modules to search.
    if guarded is None:
        guarded = part_guards.find_guards(handle, target.modules)
    handle.guards = guarded
    part_guards.refuse_part_calls(handle)
    # Last, so that the writes that build itself makes do not count.
    handle.written_at_build = written(handle)
    return handle


_version = attrgetter("_version")


def written(handle: FlatParamHandle) -> int:
    """Return a number that grows with every write to a sharded leaf; -1 if on meta."""
    return -1 if handle.on_meta else sum(map(_version, handle.sharded_placed))


def make_tables(handle: FlatParamHandle) -> None:
    """Compute the tuples of leaves and buffers that every step iterates over."""
    handle.tables = tuple([owner._parameters for owner in handle.owners])
    handle.sharded_placed = place_leaves(handle, [r.leaves for r in handle.regions])
    note_memory(handle)
    handle.on_meta = any(region.shard.is_meta for region in handle.regions)
    handle.trainable = handle.regions
    if not all(r.layout.trainable for r in handle.regions):
        handle.trainable = tuple([r for r in handle.regions if r.layout.trainable])
    handle.reduce_groups = _reduced_together(handle)
    handle.handed_out, handle.foreign = (), {}
    # ``runtime.backward.install_grad_hooks`` adds hooks and AccumulateGrad nodes.
    number = len(handle.sharded_placed)
    handle.form = make_form(handle, unreadable_versions(number), full_precision=False)
    handle.other_form = None


def note_memory(handle: FlatParamHandle) -> None:
    """Record where the data of every leaf is, for ``shards_are_unchanged``."""
    here: list[nn.Parameter] = []
    absent: list[nn.Parameter] = []
    for region in handle.regions:
        for leaf in region.leaves:
            (here if leaf.numel() else absent).append(leaf)
    # An empty tensor has no address (``data_ptr()`` is 0), so leaves without elements
    # are compared by their storage.
    handle.here, handle.here_at = tuple(here), tuple([leaf.data_ptr() for leaf in here])
    # Strong references: if a storage were freed, a new storage could get the same id.
    memory = tuple([leaf.untyped_storage() for leaf in absent])
    handle.absent, handle.absent_in = tuple(absent), memory


def _reduced_together(
    handle: FlatParamHandle,
) -> tuple[tuple[FlatParameter, ...], ...]:
    """Return the trainable regions with elements, grouped by reduce dtype."""
    dtypes = {
        region: region.reduce_buffer.dtype
        for region in handle.trainable
        if region.reduce_buffer is not None and region.layout.padded_numel
    }
    # The common case, with a single region, reuses the existing tuple: fewer objects
    # for the garbage collector.
    if len(dtypes) == len(handle.trainable) == 1:
        return (handle.trainable,)
    return tuple(
        tuple(r for r, dtype in dtypes.items() if dtype is each)
        for each in dict.fromkeys(dtypes.values())
    )


def place_leaves(
    handle: FlatParamHandle, leaves: Sequence[tuple[nn.Parameter, ...]]
) -> tuple[nn.Parameter, ...]:
    """Return the leaf of each place, given the leaves of each region."""
    # Without tied parameters each leaf has a single place.
    if len(leaves) == 1 and len(leaves[0]) == len(handle.places):
        return leaves[0]
    slots = (s.index for r in handle.regions for s in r.layout.parameters)
    by_slot = dict(zip(slots, chain.from_iterable(leaves), strict=True))
    return tuple([by_slot[place.slot_index] for place in handle.places])


def make_form(
    handle: FlatParamHandle, unreadable: tuple[int, ...], *, full_precision: bool
) -> FullForm:
    """Return the full form over the regions' full buffers and leaves.

    Args:
        handle: the unit.
        unreadable: the versions of full leaves that autograd must not read.
        full_precision: whether the buffers have the parameters' own dtype.
    """
    gathering = [r for r in handle.regions if r.is_cut and r.layout.padded_numel]
    # The all-gather reads the shard directly if the shard has the compute dtype and is
    # on the compute device. Otherwise the shard is first cast or copied into this
    # rank's slice of ``full``, and the all-gather runs in place on that slice.
    inputs = [r.shard if r.own_slice is None else r.own_slice for r in gathering]
    return FullForm(
        full_precision,
        place_leaves(handle, [r.full_leaves for r in handle.regions]),
        ([r.full for r in gathering], inputs),
        tuple([(r.own_slice, r.shard) for r in gathering if r.own_slice is not None]),
        bool(gathering),
        unreadable,
    )


def set_divisions(handle: FlatParamHandle) -> None:
    """Compute how each region's sums are divided, from the unit's rule."""
    rule, ranks = handle.rule, handle.groups.world_size
    # NCCL can average; gloo and CPU tensors can only sum.
    average = handle.device.type == "cuda" and handle.groups.can_average
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        dtype = region.reduce_buffer.dtype
        region.division = division(rule, dtype, ranks=ranks, can_average=average)


def reset_handle(handle: FlatParamHandle) -> None:
    """Set the state of a unit between steps, and create events for a CUDA device."""
    handle.phase = Phase.IDLE
    handle.residency = Residency.SHARDED
    handle.ready = None
    handle.backward, handle.calls = NO_BACKWARD, []
    handle.lent = []
    handle.kept = handle.kept_full = handle.reduce_due = handle.reduce_has_memory = (
        False
    )
    handle.reduce_owner = handle.held = None
    handle.gather_event = handle.free_event = handle.reduce_event = None
    handle.leaf_stream, handle.steps = None, 0
    # Events are created here once and recorded again in every step.
    if handle.device.type == "cuda":
        handle.gather_event = StreamEvent(handle.device)
        handle.free_event = StreamEvent(handle.device)
        handle.reduce_event = StreamEvent(handle.device)
