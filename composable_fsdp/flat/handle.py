"""``FlatParamHandle``: the regions of one unit, and which form is current.

The handle holds data and answers questions. What happens to it is done by the verbs of
``views`` here and of ``runtime``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm.device import StreamEvent, Waitable
from composable_fsdp.comm.groups import Groups
from composable_fsdp.comm.order_log import OrderLog
from composable_fsdp.config import Block
from composable_fsdp.flat.parameter import FlatParameter, build_region
from composable_fsdp.flat.reduce_rule import ReduceRule, division
from composable_fsdp.naming import shown
from composable_fsdp.phases import Phase
from composable_fsdp.planning.assign import ParamInfo, Place
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.unit_plan import UnitPlan

NO_TASK = -1
"""Graph task id outside backward, as autograd reports it."""

Table = dict[str, "nn.Parameter | None"]
"""``module._parameters``."""

Swap = tuple[Table, str, nn.Parameter, nn.Parameter]
"""A place: table, key in it, sharded leaf, full leaf."""


class FlatParamHandle:
    """The flat buffers of one unit. Made by ``build_handle``."""

    __slots__ = (
        "__weakref__",
        "accumulators",
        "backward_log",
        "calls",
        "device",
        "epoch",
        "expected_calls",
        "fills",
        "forward_log",
        "fqn",
        "free_event",
        "full_fqn",
        "full_placed",
        "full_since",
        "gather_check",
        "gather_event",
        "gather_lists",
        "gathered",
        "groups",
        "held",
        "is_full",
        "kept",
        "keys",
        "leaf_stream",
        "needs_gather",
        "offload",
        "on_meta",
        "open_calls",
        "origin",
        "other_form",
        "owners",
        "pending",
        "phase",
        "places",
        "plan",
        "ready",
        "reduce_event",
        "reduce_due",
        "reduce_groups",
        "reduce_has_memory",
        "reduce_log",
        "reduce_owner",
        "regions",
        "retiring",
        "rows",
        "rule",
        "sharded_placed",
        "tables",
        "tapes",
        "task",
        "trainable",
        "wide",
    )

    plan: UnitPlan
    origin: tuple[RegionLayout, ...]
    """The regions as they were planned; ``plan`` tells what they are now."""
    epoch: int
    """How often the regions were laid out anew."""
    fqn: str
    """Name of the unit's module from the module ``fully_shard`` was called on."""
    full_fqn: str
    """The same from the root, once lazy initialization has found it."""
    regions: tuple[FlatParameter, ...]
    groups: Groups
    device: torch.device
    """Where full parameters are, and compute."""
    offload: bool
    """Whether the shards and their gradients are on the host."""
    on_meta: bool
    """Whether the shards have no values yet."""
    rows: bool
    places: tuple[Place, ...]
    """Where modules show the parameters. What goes with each place is beside it in
    tuples of their own, because the collector looks at every tuple of every unit:"""
    owners: tuple[nn.Module, ...]
    tables: tuple[Table, ...]
    keys: tuple[str, ...]
    sharded_placed: tuple[nn.Parameter, ...]
    full_placed: tuple[nn.Parameter, ...]
    phase: Phase
    is_full: bool
    """Whether the full leaves are in the modules and may be read."""
    ready: Waitable | None
    """An all-gather that was issued and not waited for."""
    gathered: bool
    """Whether ``full`` has memory that an all-gather has filled or is filling."""
    needs_gather: bool
    gather_lists: tuple[list[Tensor], list[Tensor]]
    """``full`` and gather input of each region that has elements to gather."""
    fills: tuple[tuple[Tensor, Tensor], ...]
    """Our slice of ``full`` and the shard it is filled from, before the gather."""
    trainable: tuple[FlatParameter, ...]
    """Regions whose parameters have gradients."""
    reduce_groups: tuple[tuple[FlatParameter, ...], ...]
    """Trainable regions with elements, those of one reduce dtype together."""
    accumulators: tuple[Any, ...]
    """The autograd nodes that accumulate into the trainable full leaves."""
    calls: list[Any]
    """Forwards that are running, outermost first; ``None`` if without gradients."""
    gather_check: tuple[tuple[nn.Parameter, ...], tuple[int, ...]]
    """Leaves with elements on this rank, and where their data has to be."""
    wide: bool
    """Whether the full form is that of the parameters' own dtype; see ``forms``."""
    other_form: Any
    # Backward. ``task`` is the graph task whose pre-backward has seen this unit, which
    # owes ``pending`` gradients; inputs of ``open_calls`` forwards wait for theirs.
    task: int
    pending: int
    open_calls: int
    expected_calls: int
    """Open calls whose inputs will say when they are done; the unit reduces then."""
    tapes: tuple[Any, ...]
    """Forwards whose open calls are in ``open_calls``."""
    kept: bool
    """Whether the memory of ``full`` stays until the end of the next backward."""
    full_since: tuple[int, ...] | None
    """Of a unit that was left full on purpose: the versions of its leaves then."""
    forward_log: OrderLog | None
    backward_log: OrderLog | None
    reduce_log: OrderLog | None
    """Where its gathers in forward and backward and its reductions are compared with
    those of other ranks; ``None`` for what it does not send."""
    reduce_due: bool
    """Whether gradients are expected, or are here, that no reduction took."""
    reduce_has_memory: bool
    """Whether the reduce buffers have; those of a reduction in flight, too."""
    rule: ReduceRule
    held: tuple[bytes, ...] | None
    """What had arrived when sums went into ``partial``; ``None`` if nothing waits."""
    # CUDA only: made once, recorded again each time.
    gather_event: StreamEvent | None
    free_event: StreamEvent | None
    reduce_event: StreamEvent | None
    reduce_owner: torch.cuda.Stream | None
    """The stream on which the reduce buffers got their memory."""
    leaf_stream: torch.cuda.Stream | None
    """The stream on which hooks of full leaves run: that of build."""
    retiring: bool

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The sharded leaves, which are the original parameters, in region order."""
        return tuple(leaf for region in self.regions for leaf in region.leaves)

    @property
    def infos(self) -> tuple[ParamInfo, ...]:
        """The places of all parameters, in region order."""
        return tuple(
            ParamInfo(place.fqn, owner, *place[1:])
            for place, owner in zip(self.places, self.owners, strict=True)
        )

    @property
    def swaps(self) -> Iterator[Swap]:
        """The places of all parameters, with what they show in either form."""
        return zip(
            self.tables, self.keys, self.sharded_placed, self.full_placed, strict=True
        )

    @property
    def _fqns(self) -> tuple[str, ...]:
        """Names of the parameters from the unit's module, in region order."""
        return tuple(s.fqn for r in self.plan.regions for s in r.parameters)

    @property
    def _param_infos(self) -> tuple[ParamInfo, ...]:
        """First owners, in region order."""
        return tuple({info.slot_index: info for info in reversed(self.infos)}.values())[
            ::-1
        ]

    @property
    def _shared_param_infos(self) -> tuple[ParamInfo, ...]:
        """The further places of shared parameters."""
        first = set(map(id, self._param_infos))
        return tuple(info for info in self.infos if id(info) not in first)

    @property
    def _shard_param_indices(self) -> tuple[int, ...]:
        """Indices into ``_fqns`` of parameters of which this rank holds elements."""
        spans = [
            r.layout.interval(slot, r.rank)
            for r in self.regions
            for slot in r.layout.parameters
        ]
        return tuple(i for i, (start, stop) in enumerate(spans) if stop > start)

    @property
    def name(self) -> str:
        """How messages call the unit."""
        return shown(self.full_fqn)

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle(fully sharded module {self.name}, {len(self._fqns)} "
            f"parameters, {len(self.regions)} regions, {self.phase.value}, "
            f"{'full' if self.is_full else 'sharded'})"
        )


def build_handle(
    target: Target, *, groups: Groups, device: torch.device, sharded: bool = False
) -> FlatParamHandle:
    """Turn a planned unit into buffers and leaves; its parameters are sharded then.

    One unit at a time, so the memory above the shards is that of one unit. With
    ``sharded`` the parameters are this rank's parts already. Sends nothing.
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
    handle.rule = ReduceRule()
    make_tables(handle)
    set_divisions(handle)
    reset_handle(handle)
    remember_leaves(handle)
    return handle


def make_tables(handle: FlatParamHandle) -> None:
    """Compute once what every step needs."""
    handle.tables = tuple([owner._parameters for owner in handle.owners])
    handle.keys = tuple([place.name for place in handle.places])
    handle.sharded_placed = place_leaves(handle, [r.leaves for r in handle.regions])
    handle.full_placed = place_leaves(handle, [r.full_leaves for r in handle.regions])
    make_gather_lists(handle)
    here = [leaf for region in handle.regions for leaf in region.leaves if leaf.numel()]
    handle.gather_check = tuple(here), tuple([leaf.data_ptr() for leaf in here])
    handle.on_meta = any(region.shard.is_meta for region in handle.regions)
    handle.trainable = tuple([r for r in handle.regions if r.layout.trainable])
    groups: dict[torch.dtype, list[FlatParameter]] = {}
    for region in handle.trainable:
        if region.reduce_buffer is not None and region.layout.padded_numel:
            groups.setdefault(region.reduce_buffer.dtype, []).append(region)
    handle.reduce_groups = tuple(tuple(group) for group in groups.values())
    handle.accumulators = ()


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
    handle.kept = handle.reduce_due = handle.reduce_has_memory = False
    handle.reduce_owner = handle.held = handle.full_since = None
    handle.gather_event = handle.free_event = handle.reduce_event = None
    handle.leaf_stream = None
    if handle.device.type == "cuda":
        handle.gather_event = StreamEvent(handle.device)
        handle.free_event = StreamEvent(handle.device)
        handle.reduce_event = StreamEvent(handle.device)


# Which unit a parameter belongs to, so that functions which are given bare parameters
# (``clip_grad_norm_``) find the groups. Keyed by identity and not by a weak reference,
# because a weak reference to a parameter makes ``torch.utils.swap_tensors`` refuse it;
# the handle keeps its leaves alive, so an identity cannot be reused while the entry
# stands.
class _LeavesOf(weakref.ref[FlatParamHandle]):
    """A weak reference to a handle; ``indices`` are its leaves', by identity."""

    __slots__ = ("indices",)
    indices: dict[int, int]


LEAVES: dict[int, _LeavesOf] = {}


def remember_leaves(handle: FlatParamHandle) -> None:
    """Make ``find_leaf`` know this handle's leaves until the handle is gone."""
    link = _LeavesOf(handle, _forget)
    link.indices = {id(leaf): index for index, leaf in enumerate(handle.leaves)}
    LEAVES.update(dict.fromkeys(link.indices, link))


def _forget(link: weakref.ref[FlatParamHandle]) -> None:
    assert isinstance(link, _LeavesOf)
    for key in link.indices:
        if LEAVES.get(key) is link:
            del LEAVES[key]


def forget_leaves(handle: FlatParamHandle) -> None:
    """Take this handle's leaves out of what ``find_leaf`` knows."""
    for leaf in handle.leaves:
        link = LEAVES.get(id(leaf))
        if link is not None and link() is handle:
            del LEAVES[id(leaf)]


def find_leaf(parameter: Any) -> tuple[FlatParamHandle, int] | None:
    """The handle whose sharded leaf this is, and its index; ``None`` if of none."""
    key = id(parameter)
    link = LEAVES.get(key)
    handle = None if link is None else link()
    return (handle, link.indices[key]) if link and handle is not None else None
