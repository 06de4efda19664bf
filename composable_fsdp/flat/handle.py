"""``FlatParamHandle``: the regions of one unit, and which form is current.

The handle holds data and answers questions. What happens to it is done by the verbs of
``views`` here and of ``runtime``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm.device import StreamEvent, Waitable
from composable_fsdp.comm.groups import Groups
from composable_fsdp.comm.order_log import OrderLog
from composable_fsdp.flat.reduce_rule import ReduceRule
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase
from composable_fsdp.planning.assign import ParamInfo, Place
from composable_fsdp.planning.layout import RegionLayout
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
        "absent",
        "absent_in",
        "accumulators",
        "backward_log",
        "calls",
        "device",
        "epoch",
        "expected_calls",
        "fills",
        "foreign",
        "forward_log",
        "fqn",
        "free_event",
        "full_fqn",
        "full_placed",
        "full_since",
        "gather_event",
        "gather_lists",
        "gathered",
        "groups",
        "guards",
        "handed_out",
        "held",
        "here",
        "here_at",
        "is_full",
        "kept",
        "keys",
        "leaf_stream",
        "lent",
        "needs_gather",
        "offload",
        "on_meta",
        "open_calls",
        "origin",
        "other_form",
        "owners",
        "pending",
        "parts_open",
        "phase",
        "places",
        "plan",
        "readable",
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
        "steps",
        "tables",
        "tapes",
        "task",
        "trainable",
        "unreadable",
        "wide",
        "written_at_build",
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
    parts_open: bool
    """Whether the parts have no refusal, as inside the unit's forward."""
    guards: tuple[dict[int, Any], ...]
    """Pre-hooks of modules that refuse calls while the unit is sharded."""
    phase: Phase
    is_full: bool
    """Whether the full leaves are in the modules and may be read."""
    foreign: dict[int, Any]
    """By place, tensors of ``torch.func.functional_call`` that the modules show while
    the unit is full, instead of its own leaves."""
    readable: tuple[int, ...] | None
    """The versions at which autograd may read the leaves of ``full_placed``; ``None``
    while it may not (``shard_versions``)."""
    unreadable: tuple[int, ...]
    """The versions that those leaves have meanwhile."""
    handed_out: tuple[nn.Parameter, ...]
    """Flat parameters of the regions that have one."""
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
    lent: list[Any]
    """What those of them have to give back that work on copies of containers."""
    here: tuple[nn.Parameter, ...]
    """Leaves with elements on this rank."""
    here_at: tuple[int, ...]
    """Where their data has to be."""
    absent: tuple[nn.Parameter, ...]
    """Leaves without elements on this rank."""
    absent_in: tuple[torch.UntypedStorage, ...]
    """The empty storage of each, its own, so that other data shows here, too."""
    wide: bool
    """Whether the full form is that of the parameters' own dtype; see ``forms``."""
    other_form: Any
    written_at_build: int
    """How often the sharded leaves had been written to; -1 if they were on meta."""
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
    steps: int
    """Optimizer steps over its leaves since full parameters were first kept."""
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
        return quoted(self.full_fqn)

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle(fully sharded module {self.name}, {len(self._fqns)} "
            f"parameters, {len(self.regions)} regions, {self.phase.value}, "
            f"{'full' if self.is_full else 'sharded'})"
        )


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
