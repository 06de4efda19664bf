"""The state of one fully sharded module, the root's extra data, and what a tree shares.

``fully_shard`` makes an ``_FSDPState`` per unit. Lazy initialization, at the first
forward or the first question that needs it, turns the outermost one into a
``_RootFSDPState`` and gives every state below the same ``RuntimeContext``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm.device import Streams, Waitable
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.order_log import OrderLog
from composable_fsdp.compose.registry import OwnerMap
from composable_fsdp.config import FULL_BY_DEFAULT
from composable_fsdp.errors import NotRootError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tree.order import ExecutionOrder
from composable_fsdp.tree.precision import Precision

_ROOT_ONLY = ("_all_fsdp_states", "_all_handles")


class BackwardSchedule:
    """What every rank does in the backward of one forward; see
    ``runtime.write_unit_values``.

    ``uses``: the unit of each use. ``begins``: per unit, how many uses had been
    recorded when its first forward began. ``next``: the use that backward reached last.
    ``waiting``: of ``begins``, the units not reduced yet. ``accumulates``: whether this
    backward gives any parameter a gradient.
    """

    __slots__ = ("accumulates", "begins", "next", "uses", "waiting")

    def __init__(self) -> None:
        self.uses: list[_FSDPState] = []
        self.begins: dict[_FSDPState, int] = {}
        self.next = 0
        self.accumulates = False
        self.waiting: dict[_FSDPState, int] = {}

    def record(self, state: _FSDPState, begin: int) -> None:
        """Note a use whose forward began after ``begin`` others had ended."""
        self.uses.append(state)
        self.begins[state] = min(begin, self.begins.get(state, begin))


class ForwardRecord:
    """What one forward through the root leaves for its backward.

    ``order``: uses of units that will see a backward. ``open_calls``: per unit,
    forwards whose inputs still wait for their gradient. Kept alive by the autograd
    graph alone, so a forward without a backward leaves nothing behind.
    """

    __slots__ = ("mode", "open_calls", "order", "reached", "schedule", "task")

    def __init__(
        self, mode: Hashable = (), schedule: BackwardSchedule | None = None
    ) -> None:
        self.mode = mode
        """Which forward this was: first unit, training or not, gradients or not."""
        self.task = self.reached = -1
        """The last graph task that met this forward, and the earliest use it has
        reached."""
        self.order: ExecutionOrder[FlatParamHandle] = ExecutionOrder()
        self.schedule = schedule
        self.open_calls: dict[FlatParamHandle, int] = {}


class RuntimeContext:
    """What all units below one root share while they run."""

    __slots__ = (
        "__weakref__",
        "backward_logs",
        "captures",
        "dead",
        "filling",
        "forward_logs",
        "frame",
        "handles",
        "is_new",
        "lists",
        "offload",
        "outermost",
        "precisions",
        "prefetched",
        "rank0_only",
        "reducing",
        "retiring",
        "root",
        "streams",
        "summoned",
        "tape",
        "tasks",
    )

    def __init__(self, root: _RootFSDPState, device: torch.device) -> None:
        self.root = weakref.ref(root)
        self.handles: tuple[FlatParamHandle, ...] = ()
        self.lists: tuple[_FSDPState, ...] = ()
        """Units of several modules."""
        self.forward_logs: tuple[OrderLog, ...] = ()
        self.backward_logs: tuple[OrderLog, ...] = ()
        self.prefetched: list[FlatParamHandle] = []
        """Units gathered ahead of their use in this forward."""
        self.captures = False
        """Whether the backward that runs captures gradients, so that none arrives."""
        self.offload = False
        """Whether any unit keeps its shards on the host."""
        self.precisions: tuple[_FSDPState, ...] = ()
        """Units whose buffers are cast."""
        self.streams: Streams | None = None
        self.tape = ForwardRecord()
        self.outermost: _FSDPState | None = None
        """The unit whose forward began the iteration, while it runs."""
        self.frame: FrameType | None = None
        """The call that began the iteration, to tell a forward that was interrupted."""
        self.dead: set[int] = set()
        """Graph tasks that raised and are still in ``tasks``."""
        self.tasks: dict[int, list[_FSDPState]] = {}
        """Per live graph task, the units whose backward it runs, first come first."""
        self.filling: list[ForwardRecord] = []
        """Forwards whose backward runs and in which all ranks send the same."""
        self.retiring: deque[FlatParamHandle] = deque()
        """Units resharded on the CPU that the GPU may still read; oldest first."""
        self.reducing: Reduction | None = None
        """The reduction that was issued last and not finished."""
        self.summoned: _FSDPState | None = None
        """The unit on which ``unshard_params`` was called, while its block runs."""
        self.rank0_only = False
        self.is_new = True
        """Whether no forward has begun."""
        """Whether that block shows full parameters on the first rank alone."""


class Reduction:
    """A reduction on its way: whose, what to wait for, and which gradients it carries.

    ``arrived`` is per trainable region and parameter; see ``FlatParameter.arrived``.
    One that is not ``final`` leaves its sums in ``FlatParameter.partial``.
    """

    __slots__ = ("arrived", "final", "handle", "works")

    def __init__(
        self,
        handle: FlatParamHandle,
        works: list[Waitable],
        arrived: tuple[bytes, ...],
        *,
        final: bool,
    ) -> None:
        self.handle, self.works, self.arrived = handle, works, arrived
        self.final = final


class _FSDPState:
    """The state of one fully sharded module. Attached by ``fully_shard``.

    ``_is_root`` is ``None`` until lazy initialization. Root-only data asked of another
    state raises ``NotRootError``, which is an ``AttributeError``: ``hasattr`` says
    False.
    """

    __slots__ = (
        "__weakref__",
        "_is_root",
        "_parent",
        "_root_handles",
        "_root_states",
        "ahead_in_backward",
        "ahead_in_forward",
        "awaits_buffers",
        "application",
        "context",
        "copier",
        "device",
        "fqn",
        "handle",
        "is_last_backward",
        "kept_at",
        "looks",
        "modules",
        "options",
        "precision",
        "prefetches_forward",
        "ranks",
        "remaining",
        "reshard_after_backward",
        "reshard_after_forward",
        "scans",
        "state_dict_settings",
        "sums",
        "sync_gradients",
        "writes_data",
    )

    handle: FlatParamHandle
    options: UnitOptions
    ranks: RankLayout
    device: torch.device
    copier: Callable[[_FSDPState, dict[int, Any]], _FSDPState]
    """What ``copy.deepcopy`` does; set at build, because it needs the layers above."""
    precision: Precision | None
    """Casts of inputs, outputs and buffers; ``None`` if there are none."""

    def __init__(self) -> None:
        self.fqn = ""
        self.modules: tuple[nn.Module, ...] = ()
        self._is_root: bool | None = None
        self._parent: weakref.ref[_FSDPState] | None = None
        self._root_states: tuple[_FSDPState, ...] = ()
        self._root_handles: tuple[FlatParamHandle, ...] = ()
        self.context: RuntimeContext | None = None
        self.awaits_buffers = False
        """Whether buffers of the unit were on meta and are not known to be filled."""
        self.sync_gradients = True
        self.is_last_backward = True
        """Of the outermost unit: whether the end of backward waits for reductions."""
        self.reshard_after_forward: bool | None = None
        """``None`` until lazy initialization: yes, except for the root."""
        self.reshard_after_backward = True
        self.prefetches_forward = False
        self.ahead_in_forward: tuple[_FSDPState, ...] = ()
        self.ahead_in_backward: tuple[_FSDPState, ...] = ()
        """Units to gather ahead instead of the next one by the record; empty: that."""
        self.remaining: frozenset[int] = frozenset()
        """Of a list unit: modules that have not run in this forward."""
        self.application = 0
        """Which call made the unit: a policy makes several."""
        self.scans = 2
        """How many more forwards look for tensors on attributes (``escapes``)."""
        self.kept_at: tuple[tuple[dict[str, Any], str], ...] = ()
        """The attributes on which modules of the unit have kept such tensors."""
        self.looks = 2
        """How many more forwards look for writes to weights through ``.data``."""
        self.sums: list[Tensor] | None = None
        """Checksums of the full parameters as such a forward began."""
        self.writes_data = False
        """Whether one was found."""
        self.state_dict_settings = FULL_BY_DEFAULT

    @property
    def parent(self) -> _FSDPState | None:
        """The nearest unit above, ``None`` for an outermost one."""
        return self._parent() if self._parent is not None else None

    @property
    def module(self) -> nn.Module:
        """The fully sharded module (of a list, the first)."""
        return self.modules[0]

    @property
    def name(self) -> str:
        """How messages call the unit.

        Until lazy initialization a name is from where ``fully_shard`` was called, and
        there it is a class.
        """
        if not self.fqn and self._is_root is None and self.modules:
            return f"({type(self.module).__name__})"
        return quoted(self.fqn)

    @property
    def title(self) -> str:
        """The class of the unit's module, and its name once that says something."""
        kind = type(self.module).__name__
        return f"{kind} {self.name}" if self.fqn or self._is_root is not None else kind

    def __getattr__(self, name: str) -> object:
        # Only reached for what is not there.
        if name in _ROOT_ONLY:
            raise NotRootError(
                f"{name} is kept on the root only; unit {self.name} is "
                f"{'below a root' if self._is_root is False else 'not initialised'}. "
                "Ask the state of the outermost fully sharded module after the first "
                "forward."
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __repr__(self) -> str:
        kind = {True: "root", False: "below a root", None: "not initialised"}
        return f"{type(self).__name__}(unit {self.name}, {kind[self._is_root]})"

    def __deepcopy__(self, memo: dict[int, Any]) -> _FSDPState:
        return self.copier(self, memo)

    def __reduce__(self) -> str:
        raise TypeError(
            f"The state of fully sharded module {self.name} cannot be pickled: it "
            "names process groups of this run. Save module.state_dict() instead."
        )


class _RootFSDPState(_FSDPState):
    """The state of a root: it alone has the caches, in ``.modules()`` order."""

    __slots__ = ()

    @property
    def _all_fsdp_states(self) -> tuple[_FSDPState, ...]:
        return self._root_states

    @property
    def _all_handles(self) -> tuple[FlatParamHandle, ...]:
        return self._root_handles


OWNERS: OwnerMap[_FSDPState] = OwnerMap()
"""Every submodule's nearest owner, weak on both sides."""


def _get_module_fsdp_state(module: nn.Module) -> _FSDPState | None:
    """Return the state of the unit that ``module`` belongs to; ``None`` if to none.

    Works for any submodule, not only the fully sharded one. Only reads.
    """
    return OWNERS.get(module)


def _get_module_state(module: nn.Module) -> _FSDPState | None:
    """Return the state of the composable API that ``module`` belongs to.

    ``fully_shard`` and ``replicate`` keep one kind of state, so this is what
    ``_get_module_fsdp_state`` returns. Only reads.
    """
    return OWNERS.get(module)
