"""The state of a unit, the state of a root, and the objects that a tree shares."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

import composable_fsdp.tree.moments as moments
from composable_fsdp.comm.device import Streams, Waitable
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.compose.registry import OwnerMap
from composable_fsdp.config import FULL_BY_DEFAULT, StateDictSettings
from composable_fsdp.errors import NotRootError, PhaseError
from composable_fsdp.flat.handle import FlatParamHandle, UnitLayout, UseOrder
from composable_fsdp.flat.region import Referable
from composable_fsdp.naming import quoted
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.options import UnitOptions

# An attribute and no weak set: ``torch.utils.swap_tensors`` refuses parameters that
# have weak references.
IGNORED = "_composable_fsdp_left_alone"
"""Attribute that marks parameters as ignored."""


@dataclass(slots=True)
class UnitSettings:
    """The settings of a unit that the user can change between steps."""

    reshard_after_forward: bool | None = None
    """``None`` until lazy initialization chooses: True except for the root."""
    prefetches_forward: bool = False
    """Whether the unit's forward prefetches another unit."""
    sync_gradients: bool = True
    is_last_backward: bool = True
    """Of the root: whether the end of backward waits for the last reduction."""
    reshard_after_backward: bool = True
    state_dict: StateDictSettings = FULL_BY_DEFAULT


@dataclass(slots=True)
class Precision:
    """The casts of a unit with ``mixed_precision``."""

    input_dtype: torch.dtype | None
    """Dtype of floating-point inputs; None leaves inputs unchanged."""
    root_input_dtype: torch.dtype | None
    """Instead of ``input_dtype`` if the unit is the root."""
    output_dtype: torch.dtype | None
    """Dtype of floating-point outputs; None leaves outputs unchanged."""
    buffer_dtype: torch.dtype | None
    """Dtype of floating-point buffers; None leaves buffers unchanged."""
    buffer_dtypes: dict[tuple[int, str], torch.dtype] = field(default_factory=dict)
    """Original dtypes of cast buffers, by the number of the module and FQN."""


def make_precision(handle: FlatParamHandle, *, is_local_root: bool) -> Precision | None:
    """Return the casts that the unit's options ask for; ``None`` without casts."""
    mixed = handle.layout.plan.options.mixed_precision
    if mixed is None:
        return None
    # The root casts inputs if either option is set. So does, without a wrapper, the
    # root of each call, as in torch's composable FSDP1: precision is configured there.
    root_inputs = mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
    inputs = root_inputs if is_local_root else mixed.cast_forward_inputs
    return Precision(
        mixed.param_dtype if inputs else None,
        mixed.param_dtype if root_inputs else None,
        mixed.output_dtype,
        mixed.buffer_dtype,
    )


Reduced = tuple[FlatParamHandle, int, tuple[bytes, ...]]
"""A reduction in a log: unit, structure, and the parameters with a gradient."""


class StepOrder:
    """The uses of units in a forward; ``moments.ORDERS`` makes those of forwards."""

    # Kept alive by hooks in the autograd graph alone (and, the latest, by the context),
    # so a forward without a backward leaves nothing behind.
    __slots__ = ("count", "mode", "graphs", "reached", "task", "uses")

    def __init__(self, mode: Hashable = ()) -> None:
        # Backward refers to a use by the index in this list.
        self.uses: list[_FSDPState] = []
        """The unit of each use, in the order in which forwards ended."""
        self.count = 0
        """The length of ``uses``, which saves a call of ``len`` per forward."""
        self.mode = mode
        """The outermost FQN, training, gradients, and ``changed_flags``."""
        # The last graph task that reached this forward, and the index of the earliest
        # use that it has reached, for prefetching.
        self.task = self.reached = -1
        self.graphs: dict[FlatParamHandle, int] = {}
        """Per unit: number of its forwards that have a graph."""

    def add(self, unit: _FSDPState, begin: int = 0) -> int:
        """Append a use whose forward began after ``begin`` uses; return its index."""
        index = self.count
        self.uses.append(unit)
        self.count = index + 1
        return index

    def before(self, index: int) -> _FSDPState | None:
        """Return the nearest earlier use of another unit; ``None`` if there is none."""
        unit = self.uses[index]
        for i in range(index - 1, -1, -1):
            if self.uses[i] is not unit:
                return self.uses[i]
        return None

    def reach(
        self, context: RuntimeContext, handle: FlatParamHandle, index: int
    ) -> None:
        """Compare with the order log; raises DesyncError, as ``OrderLog.depart``."""
        log = handle.logs.backward
        if log is not None:
            if log.expected[log.position] is handle:
                log.position += 1
            else:
                context.enter_backward_use(log, handle, self.mode)

    def issue_until(self, context: RuntimeContext, index: int) -> None:
        """Issue the collectives of uses after ``index`` that other ranks wait for."""

    def recomputed(self) -> StepOrder:
        """Return the order of a forward that is recomputed in backward."""
        raise NotImplementedError

    def reduce(self, context: RuntimeContext, handle: FlatParamHandle) -> None:
        """Reduce a unit whose gradients of this backward are complete."""
        raise NotImplementedError

    def prefetch(self, context: RuntimeContext, order: StepOrder, reached: int) -> None:
        """Prefetch the unit before use ``reached`` once the backward of a unit ends."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class RuntimeContext(Referable):
    """The runtime objects that all units below a root share."""

    # Weak: no garbage collection should be needed to free a model.
    root: weakref.ref[_RootFSDPState]
    streams: Streams
    handles: tuple[FlatParamHandle, ...] = ()
    # So that a step does not visit all units.
    lists: tuple[_FSDPState, ...] = ()
    """Units that consist of several modules."""
    precisions: tuple[_FSDPState, ...] = ()
    """Units whose buffers are cast."""
    offload: bool = False
    changed_flags: tuple[tuple[str, bool | None], ...] = ()
    """Parameters and settings that were changed since; part of a forward's mode."""
    forward_logs: tuple[UseOrder, ...] = ()
    """Order logs of all-gathers in forward."""
    backward_logs: tuple[UseOrder, ...] = ()
    """Order logs of all-gathers and reductions in backward."""
    prefetched: list[FlatParamHandle] = field(default_factory=list)
    """Prefetched in this forward; resharded at its end if unused."""
    # Replaced, and not cleared, when an iteration begins: hooks in the autograd
    # graph still refer to the order of their own forward.
    order: StepOrder = field(default_factory=StepOrder)
    tail: tuple[Any, Any] | None = None
    """In a forward: the last call, and the node of its output, if it has one."""
    entered: _FSDPState | None = None
    """The unit whose forward began the iteration, while that forward runs."""
    # A KeyboardInterrupt runs no forward hook and leaves ``entered`` set: then
    # the frame is no longer on the stack (``recover.is_live``).
    frame: FrameType | None = None
    """Stack frame of the module call that began the iteration, while it runs."""
    dead: set[int] = field(default_factory=set)
    """Graph tasks that raised and are still in ``tasks``."""
    tasks: dict[int, list[_FSDPState]] = field(default_factory=dict)
    """Per live graph task: the units whose backward runs, in order of arrival."""
    # Their reductions that no gradient triggers are sent at the end of backward, or
    # by the backward of an earlier forward.
    filling: list[StepOrder] = field(default_factory=list)
    """Forwards with ``unused_units.CommonOrder`` whose backward is running."""
    retiring: deque[FlatParamHandle] = field(default_factory=deque)
    """Resharded units whose ``full`` the GPU may still read, oldest first."""
    all_reducing: Reduction | None = None
    """CUDA only: the reduction before, whose all-reduce is in flight."""
    reducing: Reduction | None = None
    """The reduction that was issued last and is not finished."""
    summoned: Summon | None = None
    """The running block of ``unshard_params``, or the sleep of the tree."""
    is_checked: bool = False
    """Whether the first forward has made its extra checks."""
    observers: tuple[Any, ...] = ()  # empty in steady steps
    """Are told by ``iteration_begins`` and ``iteration_ends`` of outermost forwards."""

    def enter_backward_use(
        self, log: UseOrder, use: FlatParamHandle | Reduced, forward: Hashable = ()
    ) -> None:
        """Call ``log.depart`` for a use in backward. Raises: DesyncError."""
        if log.is_open:
            # Computing the mode reads all units, so this is done once per round.
            log.depart(use, ())
            return
        # Rounds under ``no_sync`` have an order of their own; freezing changes regions.
        root = self.root()
        states = root._root_states if root is not None else ()
        syncs = tuple([state.settings.sync_gradients for state in states])
        structures = tuple([s.handle.layout.structure for s in states])
        log.depart(use, (forward, syncs, structures, self.changed_flags))


class Summon(NamedTuple):
    """A running block of ``unshard_params``, or another reason to refuse a step."""

    state: _FSDPState
    rank0_only: bool
    why: str = (
        "inside {}, where the parameters are yours to change. Call "
        "it after the block: forward and backward gather by themselves, and "
        "register_forward_method(module, name) has another method do so."
    )
    """Where a call is refused, and the way out; ``{}`` stands for ``name``."""
    what: str = "unshard_params"
    record: Any = None
    """What ``sleep`` took away; None of a block, inside of which others may run."""

    def refusal(self, call: str) -> PhaseError:
        """Return the error of a ``call``: who was called on what."""
        name = self.name if self.record is None else self.state.name
        return PhaseError(f"{call} {self.why.format(name)}")

    @property
    def name(self) -> str:
        """The function and the unit as error messages print them."""
        return f"{self.what} of {self.state.name}"


@dataclass(slots=True, eq=False)
class Reduction:
    """A reduction in flight."""

    handle: FlatParamHandle
    works: list[Waitable]
    """The collectives to wait for; empty on CUDA, which waits for events."""
    arrived: tuple[bytes, ...]
    final: bool
    """False if the sums wait in ``ReduceBuffer.partial`` for an all-reduce."""


T = TypeVar("T")

NOBODY, SHARD_RANKS, ALL_RANKS = range(3)
"""Values of ``InitialWeights.compared``; all are also the replicas."""


@dataclass(slots=True, eq=False)
class InitialWeights:
    """The values that ``fully_shard`` was given, which a rank keeps as hashes."""

    is_checked: bool  # with ``check_weights`` and other ranks
    hashes: Tensor | None
    """The hash of each parameter, by slot index; None if nothing is compared."""
    synced: bool  # by a broadcast
    # Two tuples of integers: the garbage collector would visit each pair.
    _ids: tuple[int, ...] = ()
    _versions: tuple[int, ...] = ()
    compared: int = NOBODY
    """On the outermost unit of a tree: with which ranks the tree was compared."""
    awaits_buffers: bool = False
    """Whether buffers of the unit were on meta and may still have no values."""
    drawn: dict[int, int] = field(default_factory=dict)
    """By slot index: the start of random numbers that were drawn into a shard."""
    was_on_meta: bool = False
    """Whether shards were on meta on any rank; known from the first gather."""

    def mark(self, layout: UnitLayout) -> None:
        """Remember that the sharded parameters hold the initial values."""
        if not self.is_checked:
            return
        leaves = sharded_leaves(layout)
        self._ids = tuple(map(id, leaves))
        self._versions = tuple([leaf._version for leaf in leaves])

    def forget(self) -> None:
        """Remember that the values have been replaced since."""
        self._versions = (-1,) * len(self._versions)

    def unwritten(self, layout: UnitLayout) -> list[bool]:
        """Return, by slot index, whether a parameter holds its initial value."""
        leaves = sharded_leaves(layout)
        if not self._ids:  # made on meta
            return [False] * len(leaves)
        found = zip(map(id, leaves), leaves, self._ids, self._versions, strict=True)
        return [one == own and leaf._version == at for one, leaf, own, at in found]

    def copy(self, layout: UnitLayout, copied: UnitLayout) -> InitialWeights:
        """Return what a copy of the unit remembers; ``copied`` is the copy's layout."""
        made = InitialWeights(
            is_checked=self.is_checked, hashes=self.hashes, synced=self.synced
        )
        made.awaits_buffers = self.awaits_buffers
        # The copied tensors have versions of their own; none has the version -1.
        made.mark(copied)
        now, kept = made._versions, self.unwritten(layout)  # ``now`` may be empty
        made._versions = tuple(
            [v if same else -1 for v, same in zip(now, kept, strict=False)]
        )
        return made


def sharded_leaves(layout: UnitLayout) -> list[nn.Parameter]:
    """Return the sharded parameters of a unit, in the order of the slots."""
    return in_slot_order(layout.plan.regions, [r.leaves for r in layout.regions])


def in_slot_order(
    regions: tuple[RegionLayout, ...], found: Sequence[Sequence[T]]
) -> list[T]:
    """Return the values ``found`` of each region, in the order of the slots."""
    by_slot: dict[int, T] = {}
    for region, values in zip(regions, found, strict=True):
        by_slot.update(zip(region.indices, values, strict=True))
    return [by_slot[i] for i in sorted(by_slot)]


@dataclass(slots=True, eq=False, repr=False)
class _FSDPState(Referable):
    """The state of a unit. Attached to the unit's modules by ``fully_shard``."""

    fqn: str = ""
    """FQN of the unit's module; from the root after lazy initialization."""
    modules: tuple[nn.Module, ...] = ()
    _is_root: bool | None = None
    # Weak: a unit must not keep the modules above alive.
    _parent: weakref.ref[_FSDPState] | None = None
    _root_states: tuple[_FSDPState, ...] = ()
    """Cache of all states of the tree; filled on the root only."""
    context: RuntimeContext | None = None
    """The objects that the tree shares; ``None`` until lazy initialization."""
    # Of a copied unit empty again.
    ahead_in_forward: tuple[_FSDPState, ...] = ()
    """Units to prefetch in forward. Empty: the next unit by the forward log."""
    ahead_in_backward: tuple[_FSDPState, ...] = ()
    """Units to prefetch in backward. Empty: the unit used before in forward."""
    remaining: frozenset[int] = frozenset()
    """Of a unit of several modules: ids of those still to run in this forward."""
    # Set by ``fill``.
    handle: FlatParamHandle = field(init=False)
    options: UnitOptions = field(init=False)
    settings: UnitSettings = field(init=False)
    precision: Precision | None = field(init=False)
    ranks: RankLayout = field(init=False)
    initial: InitialWeights = field(init=False)
    passage: Any = field(init=False)
    """How values enter and leave forwards (``runtime.forward.Passage``)."""
    searches: Any = field(init=False)
    """What the first forwards have found, for the passage."""

    def fill(
        self,
        fqn: str,
        modules: tuple[nn.Module, ...],
        handle: FlatParamHandle,
        precision: Precision | None,
        *,
        options: UnitOptions,
        ranks: RankLayout,
        initial: InitialWeights,
        settings: UnitSettings,
    ) -> None:
        """Make this state the state of a unit."""
        self.fqn, self.modules = fqn, modules
        self.handle, self.options, self.settings = handle, options, settings
        self.precision, self.ranks, self.initial = precision, ranks, initial
        self.passage = moments.PASSAGES["first"]
        self.searches = moments.PASSAGES["searches"](modules)

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self.handle.layout.device

    @property
    def parent(self) -> _FSDPState | None:
        """The nearest unit above; ``None`` for an outermost unit."""
        return self._parent() if self._parent is not None else None

    @property
    def module(self) -> nn.Module:
        """The unit's module; the first module of a list."""
        return self.modules[0]

    @property
    def name(self) -> str:
        """The unit's name as error messages print it."""
        # Until lazy initialization the FQN of that module itself is empty.
        if not self.fqn and self._is_root is None and self.modules:
            return f"({type(self.module).__name__})"
        return quoted(self.fqn)

    @property
    def title(self) -> str:
        """The class of the unit's module, followed by the name if known."""
        kind = type(self.module).__name__
        return f"{kind} {self.name}" if self.fqn or self._is_root is not None else kind

    # Not ``__getattr__``, with which Python looks every attribute up slowly.
    @property
    def _all_fsdp_states(self) -> tuple[_FSDPState, ...]:
        """States of all units, in ``.modules()`` order. Raises: NotRootError."""
        self._require_root("_all_fsdp_states")
        return self._root_states

    @property
    def _all_handles(self) -> tuple[FlatParamHandle, ...]:
        """Handles of all units, in ``.modules()`` order. Raises: NotRootError."""
        self._require_root("_all_handles")
        return tuple(state.handle for state in self._root_states)

    def _require_root(self, name: str) -> None:
        """Raise NotRootError where another unit is asked for the root's data."""
        if self._is_root:
            return
        raise NotRootError(
            f"{name} is kept on the root only; unit {self.name} is "
            f"{'below a root' if self._is_root is False else 'not initialised'}. Ask "
            "the state of the outermost fully sharded module after the first forward."
        )

    def __repr__(self) -> str:
        kind = {True: "root", False: "below a root", None: "not initialised"}
        return f"{type(self).__name__}(unit {self.name}, {kind[self._is_root]})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return moments.copy_state(self, memo)

    def __reduce__(self) -> str:
        # Process groups exist only in this run, so an unpickled state could not work.
        raise TypeError(
            f"The state of fully sharded module {self.name} cannot be pickled: it "
            "names process groups of this run. Save module.state_dict() instead."
        )


class _RootFSDPState(_FSDPState):
    """The state of a root, with the caches of all units in ``.modules()`` order."""

    __slots__ = ()


OWNERS: OwnerMap[_FSDPState] = OwnerMap()
"""The unit of every module below a unit; weak references to modules and to states."""


def _get_module_fsdp_state(module: nn.Module) -> _FSDPState | None:
    """Return the state of the unit that holds ``module``; ``None`` outside any unit."""
    return OWNERS.get(module)


_get_module_state = _get_module_fsdp_state
"""The name for any composable API of torch."""


def root_of(context: RuntimeContext) -> _RootFSDPState:
    """Return the root state of ``context``, alive while a module of its can run."""
    root = context.root()
    assert root is not None
    return root


def is_below(frame: FrameType, top: FrameType | None) -> bool:
    """Return whether ``frame`` is on the stack that ends with ``top``."""
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None
