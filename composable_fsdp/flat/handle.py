"""``FlatParamHandle``: a unit's flat buffers, and the unit's state during a step."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from composable_fsdp.comm.device import Waitable, make_events
from composable_fsdp.comm.groups import Groups
from composable_fsdp.flat.memory import GatherSource
from composable_fsdp.flat.param_form import Forms
from composable_fsdp.flat.region import FlatParameter, ReduceRule, TrainableRegion
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.unit_plan import Place, UnitPlan


class UseOrder(Protocol):
    """What the core uses of a ``features.guard.order_log.OrderLog``."""

    expected: Sequence[object]
    """The recorded uses of this round, with which the core compares a use inline."""
    position: int
    is_open: bool
    number: int
    """The index among the logs over its group."""

    def depart(self, use: object, mode: Hashable) -> None:
        """Record another use than the expected one."""

    def end(self) -> None:
        """End the round."""

    def drop(self) -> None:
        """Forget the round."""


class UnitLogs(NamedTuple):
    """The order logs of a unit; ``None`` if the unit sends no such collective."""

    forward: UseOrder | None = None
    backward: UseOrder | None = None
    reduce: UseOrder | None = None


NO_LOGS = UnitLogs()

NO_TASK = -1
"""Graph task id outside backward, as the autograd engine reports it."""

Table = dict[str, "nn.Parameter | None"]
"""``module._parameters``."""

Swap = tuple[Table, str, nn.Parameter, nn.Parameter]
"""One place of a parameter: table, key in the table, sharded leaf, full leaf."""


@dataclass(slots=True, eq=False)
class FullForm:
    """The full buffers and leaves of a unit."""

    placed: tuple[nn.Parameter, ...]
    swaps: tuple[Swap, ...]
    gather_lists: tuple[list[Tensor], list[Tensor]]
    """The outputs and the inputs of the all-gather, of each region with elements."""
    fulls: list[Tensor]
    """``full`` of these regions; the list of the outputs, if nothing is encoded."""
    fills: tuple[tuple[Tensor, Tensor], ...]
    """Pairs (this rank's slice of ``full``, shard) to copy before the all-gather."""
    needs_fill: bool
    """Whether any region has a ``full`` buffer of its own that must be filled."""
    unreadable: tuple[int, ...]
    """Versions of ``placed`` while autograd must not read them (``flat.residency``)."""
    readable: tuple[int, ...] | None = None
    """The same while autograd may read the leaves; ``None`` while it must not."""
    handed: Callable[[FlatParamHandle], bool] | None = None
    """Called by the reshard if a user got the full leaves: whether memory must stay."""
    accumulators: tuple[Any, ...] = ()
    """AccumulateGrad nodes of the trainable full leaves, which hold them weakly."""
    arena_slot: Any = None
    """Where the full leaves lie, if not in storages of their own: in a ``Slot``."""
    source: GatherSource | None = None
    """What an all-gather reads, if not the shards or this rank's slices."""


@dataclass(slots=True)
class BackwardProgress:
    """How far a graph task is in a unit. Each graph task has an object of its own."""

    task: int
    pending: int = 0
    """Full leaves whose hook has not run in ``task``, also of those it will not run."""
    retained: bool = False
    """Whether the backward builds a graph, so that the unit stays full."""
    open_calls: int = 0
    """Forwards in ``orders`` whose inputs wait for gradients."""
    expected_calls: int = 0
    """Number of open calls with input hooks. If all have, the last reduces the unit."""
    endless: bool = False
    """Whether backward has reached a call without an alias, whose end no hook tells."""
    orders: tuple[Any, ...] = ()
    """The forwards (``StepOrder``) that ``open_calls`` counts."""


NO_BACKWARD = BackwardProgress(NO_TASK)
"""The progress of every unit outside backward. Never changed."""


# Not ``frozen=True``, whose constructor takes five times as long: a test holds that no
# field is written.
@dataclass(slots=True, eq=False)
class UnitLayout:
    """The regions of a unit and the places of its parameters. Replaced as a whole."""

    plan: UnitPlan
    origin: tuple[RegionLayout, ...]
    """Region layouts as ``fully_shard`` made them, but with today's dtypes."""
    structure: int
    """A checksum of the parameters in each region; 0 for those of ``fully_shard``."""
    device: torch.device
    """The compute device, which holds the full parameters."""
    offload: bool
    """Whether the shards and the sharded gradients are in host memory."""
    on_meta: bool
    """Whether the shards are on the meta device and have no values yet."""
    regions: tuple[FlatParameter, ...]
    trainable: tuple[TrainableRegion, ...]
    reduce_groups: tuple[tuple[TrainableRegion, ...], ...]
    """Trainable regions with elements, grouped by reduce dtype."""
    # Aligned by place, as ``FullForm.placed``: parallel tuples, because the garbage
    # collector would visit each of many records. A tied parameter has several places.
    places: tuple[Place, ...]
    owners: tuple[nn.Module, ...]
    tables: tuple[Table, ...]
    keys: tuple[str, ...]
    sharded_placed: tuple[nn.Parameter, ...]
    forms: Forms
    """The forms of the parameters that compute sees as another class."""


class LeafMemory(NamedTuple):
    """Where the data of a unit's leaves is expected."""

    leaves: tuple[nn.Parameter, ...]
    """Sharded leaves with elements on this rank."""
    addresses: tuple[int, ...]
    empty: tuple[nn.Parameter, ...]
    """Sharded leaves without elements on this rank, which have no address."""
    storages: tuple[torch.UntypedStorage, ...]
    """The storage of each of ``empty``, of its own: kept, so that its id is."""


def leaf_memory(layout: UnitLayout) -> LeafMemory:
    """Return where the data of every leaf is, for ``shards_are_unchanged``."""
    here: list[nn.Parameter] = []
    empty: list[nn.Parameter] = []
    addresses: list[int] = []
    for region in layout.regions:
        begin, size = region.shard.data_ptr(), region.shard.element_size()
        pairs = [*zip(region.leaves, region.cuts.parts, strict=True)]
        here += [leaf for leaf, (start, stop, _) in pairs if stop > start]
        # From the cuts: of fake tensors ``begin`` is 0, and the address the offset.
        addresses += [begin + at * size for _, (i, stop, at) in pairs if stop > i]
        empty += [leaf for leaf, (start, stop, _) in pairs if stop == start]
    storages = tuple([leaf.untyped_storage() for leaf in empty])
    return LeafMemory(tuple(here), tuple(addresses), tuple(empty), storages)


Guards = tuple[OrderedDict[int, Any], ...]


@dataclass(slots=True)
class ShardWrites:
    """How changes of a unit's shards are noticed that the unit has not made itself."""

    at_build: int
    """Sum of the version counters of the sharded leaves at build; -1 if on meta."""
    gathered_at: tuple[int, ...] | None = None
    """``shard_versions`` at the last all-gather; None if never kept full."""
    steps: int = 0
    """Optimizer steps over the unit's leaves since counting began."""
    steps_per_reduction: int = 0
    """1 if values stay beside the shards: then a reduction, or a load, counts as a step
    on all ranks. A write shows on ranks with elements alone, as does ``.grad``."""
    flat_parameters: tuple[nn.Parameter, ...] = ()
    """Flat parameters of the regions for which ``flat_of`` created a flat parameter."""
    memory: LeafMemory = field(init=False)


@dataclass(slots=True)
class ReductionProgress:
    """Which gradients of a unit wait for a reduction."""

    due: bool = False
    """Whether gradients are expected, or have arrived, that no reduction has taken."""
    has_memory: bool = False
    """Whether reduce buffers are allocated, until an all-gather takes the memory."""
    in_flight: bool = False
    all_reduces: bool = False
    """Whether an all-reduce on a stream of its own writes the flat gradients."""
    held: tuple[bytes, ...] | None = None
    """Arrival flags per trainable region of the sums that wait; None without."""


class FlatParamHandle:
    """The flat buffers of a unit, and the unit's state."""

    def __init__(
        self,
        layout: UnitLayout,
        form: FullForm,
        *,
        groups: Groups,
        rule: ReduceRule,
        guards: Guards,
        writes: ShardWrites,
    ) -> None:
        self.groups, self.rule = groups, rule
        self.full_fqn = layout.plan.fqn
        """FQN of the module, from the root after lazy initialization."""
        self.paths: dict[int, str] = {}
        """Of a unit of several modules below a root: paths of its owners, by id."""
        self.logs = NO_LOGS
        self.guards = guards
        """Tables of forward pre-hooks, one per part of the unit (``part_guards``)."""
        # ``Any``: the class is in a higher layer.
        self.calls: list[Any] = []
        """The ``UnitForward`` of each running forward of the unit, outermost first."""
        self.writes = writes
        self.indices: dict[int, int] = {}
        """By id of a sharded leaf: its index (``remember_leaves``)."""
        self.begin_layout(layout, form)

    def begin_layout(self, layout: UnitLayout, form: FullForm) -> None:
        """Make ``layout`` the unit's layout; the unit is sharded and between steps."""
        self.layout = layout
        for region in layout.trainable if self.rule.keeps_empty else ():
            region.gradient.keeps_empty = True
        self.form = form
        """The full buffers and leaves; replaced if the leaves must be new ones."""
        self.phase = Phase.IDLE
        self.residency = Residency.SHARDED
        """Where the full parameters are. Only ``flat.residency`` writes the field."""
        self.ready: Waitable | None = None
        """The pending all-gather, or ``None`` if no all-gather is pending."""
        self.backward = NO_BACKWARD
        self.kept_for_backward = False
        """Whether ``full`` stays allocated until the end of the next backward
        (``create_graph=True``), or of a call (``call_where``)."""
        self.kept_for_forward = False
        """Whether ``full`` was kept for the next forward, after backward or by
        ``unshard``."""
        self.block_leaves: list[nn.Parameter] = []
        """The full parameters that ``unshard_params`` shows, after the first block."""
        self.reduction = ReductionProgress()
        self.events = make_events(layout.device)
        self.writes.memory, self.writes.steps = leaf_memory(layout), 0
        self.writes.flat_parameters = ()

    @property
    def is_full(self) -> bool:
        """Whether the modules show full parameters, which may be read."""
        return (
            self.residency is Residency.UNSHARDED
            or self.residency is Residency.COPIES_SHOWN
        )

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The sharded leaves, which are the original parameters, in region order."""
        regions = self.layout.regions
        if len(regions) == 1:  # as most have
            return regions[0].leaves
        return tuple(chain.from_iterable([region.leaves for region in regions]))

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """All places: table, key, sharded leaf and full leaf."""
        return self.form.swaps

    @property
    def _fqns(self) -> tuple[str, ...]:
        """FQNs of the parameters from the unit's module, in region order."""
        return tuple(s.fqn for r in self.layout.plan.regions for s in r.parameters)

    @property
    def _shard_param_indices(self) -> tuple[int, ...]:
        """Indices into ``_fqns`` of the parameters with elements on this rank."""
        parts = chain.from_iterable([r.cuts.parts for r in self.layout.regions])
        return tuple(i for i, (start, stop, _) in enumerate(parts) if stop > start)

    @property
    def data_ranks(self) -> int:
        """Number of ranks whose losses are in the unit's reduced gradients."""
        return self.groups.world_size * self.rule.expert_ranks

    @property
    def name(self) -> str:
        """The unit's name in error messages."""
        return quoted(self.full_fqn)

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle(fully sharded module {self.name}, {len(self._fqns)} "
            f"parameters, {len(self.layout.regions)} regions, {self.phase.value}, "
            f"{self.residency.value})"
        )


# From a sharded leaf to its unit, for functions that get bare parameters. By id,
# because ``torch.utils.swap_tensors`` refuses a parameter with weak references; the
# handle keeps its leaves alive, so no id is used again while the entry exists.
LEAVES: dict[int, weakref.ref[FlatParamHandle]] = {}
"""By id of a sharded leaf: the reference to the leaf's handle."""


def remember_leaves(handle: FlatParamHandle) -> None:
    """Register this handle's leaves for ``find_leaf`` until the handle is deleted."""
    handle.indices = dict(zip(map(id, handle.leaves), count(), strict=False))
    link = weakref.ref(handle, partial(_forget, [*handle.indices]))
    LEAVES.update(dict.fromkeys(handle.indices, link))


def _forget(keys: list[int], link: weakref.ref[FlatParamHandle]) -> None:
    """Weak reference callback: delete the leaves of a handle that was deleted."""
    for key in keys:
        # A rebuilt unit may have registered the same leaf again.
        if LEAVES.get(key) is link:
            del LEAVES[key]


def forget_leaves(handle: FlatParamHandle) -> None:
    """Remove this handle's leaves from the registry that ``find_leaf`` reads."""
    for key in handle.indices:
        link = LEAVES.get(key)
        if link is not None and link() is handle:
            del LEAVES[key]


def find_leaf(parameter: Any) -> tuple[FlatParamHandle, int] | None:
    """Return the handle and index of a sharded leaf; ``None`` for other parameters."""
    link = LEAVES.get(id(parameter))
    handle = None if link is None else link()
    return None if handle is None else (handle, handle.indices[id(parameter)])
