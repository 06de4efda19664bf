"""The order logs of a tree: which units share a log, and how errors describe a use.

Units that send over the same process groups share a log, because the order of
collectives matters within a group::

    log        collectives                             groups
    forward    all-gathers                             shard
    backward   all-gathers, reductions                 shard, replicate

A unit that sends nothing in a direction has no log for the direction. So if forward
sends nothing, a rank may run an evaluation alone.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence

import torch.distributed as dist

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.comm.groups import Groups
from composable_fsdp.comm.order_log import NO_GRADIENT, REDUCES, OrderLog
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.tree.state import RuntimeContext

Reduced = tuple[FlatParamHandle, int, tuple[bytes, ...]]
"""A reduction in a log: the unit, the unit's ``epoch``, and, per trainable region,
which parameters had a gradient."""


def assign_order_logs(context: RuntimeContext) -> None:
    """Assign the order logs of each unit of a tree; collect all logs in ``context``.

    Collective: none.
    """
    forward: dict[tuple[str, ...], OrderLog] = {}
    backward: dict[tuple[str, ...], OrderLog] = {}
    waiting = _WaitingNote(context)
    known: dict[Groups, tuple[OrderLog | None, ...]] = {}
    for handle in context.handles:
        # A unit without elements sends no collective.
        if not any(region.layout.padded_numel for region in handle.regions):
            handle.forward_log = handle.backward_log = handle.reduce_log = None
            continue
        # Units with the same ``Groups`` object share the logs without another lookup.
        if handle.groups not in known:
            shard = handle.groups.shard
            gathers = [] if shard is None else [shard]
            in_forward = _log(forward, "forward", gathers, str)
            in_backward = _log(backward, "backward", handle.groups.present, waiting)
            # Without a shard group there is no all-gather, but gradients are reduced
            # over the replicate group.
            gathered = in_backward if gathers else None
            known[handle.groups] = in_forward, gathered, in_backward
        handle.forward_log, handle.backward_log, handle.reduce_log = known[
            handle.groups
        ]
    context.forward_logs = tuple(forward.values())
    context.backward_logs = tuple(backward.values())


def _log(
    logs: dict[tuple[str, ...], OrderLog],
    what: str,
    groups: Sequence[dist.ProcessGroup],
    note: Callable[[], str],
) -> OrderLog | None:
    """Return the log for ``groups``, created at the first call; None without groups."""
    if not groups:
        return None
    # Units may have equal groups in different ``Groups`` objects.
    key = tuple(group.group_name for group in groups)
    if key not in logs:
        peers = [Peers(group, what) for group in groups if can_compare(group)]
        tell = _describe_forward_use if what == "forward" else _describe_backward_use
        tell_mode = _mode_of_forward if what == "forward" else _mode_of_backward
        logs[key] = OrderLog(what, peers, tell, tell_mode, note)
    return logs[key]


def enter_backward_use(
    context: RuntimeContext,
    log: OrderLog,
    use: FlatParamHandle | Reduced,
    forward: Hashable = (),
) -> None:
    """Call ``log.depart`` for a use in backward.

    Args:
        context: the runtime context of the tree.
        log: the backward log of the unit.
        use: the unit, if the unit's backward begins; or the reduction.
        forward: mode of the forward to which this backward belongs. Default: (),
            unknown. Read only at the first use of a round.

    Collective: none, as ``OrderLog.depart``.
    Raises: DesyncError, as ``OrderLog.depart``.
    """
    if log.is_open:
        # The mode belongs to the round. Computing the mode reads all units, so the mode
        # is computed once per round and not once per use.
        log.depart(use, ())
        return
    # The mode contains, per unit, whether reductions are on (rounds under ``no_sync``
    # have an order of their own), and the ``epoch`` (freezing changes the regions).
    root = context.root()
    states = root._root_states if root is not None else ()
    syncs = tuple([state.sync_gradients for state in states])
    log.depart(use, (forward, syncs, tuple([s.handle.epoch for s in states])))


def _describe_forward_use(use: object) -> str:
    """Describe a use in forward, in words."""
    if isinstance(use, FlatParamHandle):
        # The size lets ranks with models of different shapes raise before a collective.
        numel = sum(region.layout.padded_numel for region in use.regions)
        return f"runs {use.name} of {numel:,} elements{_grouping(use)}"
    return "has no further unit to run"


def _grouping(handle: FlatParamHandle) -> str:
    """Describe how several regions divide the parameters, in a few characters."""
    # ``group_by`` may return different groups on different ranks (for example ``hash``
    # of a string); the sizes may be equal in spite of that.
    if len(handle.regions) < 2:
        return ""
    members = [[s.fqns for s in r.layout.parameters] for r in handle.regions]
    digest = zlib.crc32(repr(members).encode())
    return f" in {len(members)} regions (grouping {digest:08x})"


def _describe_backward_use(use: object) -> str:
    """Describe a use in backward, in words."""
    if isinstance(use, FlatParamHandle):
        return f"runs the backward of {use.name}"
    if isinstance(use, tuple):
        handle, epoch, arrived = use
        # The unit was rebuilt since, so the flags no longer match its regions.
        if epoch != handle.epoch:
            return f"reduces the gradients of {handle.name}, grouped as they were"
        missing = [quoted(fqn) for fqn in without_gradient(handle, arrived)]
        which = NO_GRADIENT + ", ".join(missing) if missing else ""
        return f"{REDUCES}{handle.name}{which}"
    return "has no further backward or reduction"


class _WaitingNote:
    """Describes the units that are in backward and wait for gradients.

    Called for each use of a recorded round.
    """

    def __init__(self, context: RuntimeContext) -> None:
        # Walking the whole tree at each use would be quadratic. Units join a graph task
        # one after another, and most have all gradients soon, so each call examines
        # only new units and those that waited before.
        self._context = weakref.ref(context)
        self._seen: dict[int, int] = {}
        """Per graph task: the number of units examined so far."""
        self._open: dict[int, list[FlatParamHandle]] = {}
        """Per graph task: the examined units that waited for gradients."""

    def __call__(self) -> str:
        """Return a line ``unit: parameters`` for each waiting unit."""
        context = self._context()
        tasks = context.tasks if context is not None else {}
        (before, self._open), (seen, self._seen) = (self._open, {}), (self._seen, {})
        lines = []
        for task, states in tasks.items():
            known = before.get(task, [])
            opened = self._open[task] = []
            self._seen[task] = len(states)
            for handle in known + [s.handle for s in states[seen.get(task, 0) :]]:
                # The unit may have joined another graph task since.
                if handle.backward.task == task and (missing := _missing(handle)):
                    opened.append(handle)
                    lines.append(f"{handle.name}: {missing}")
        return "\n".join(lines)


def _missing(handle: FlatParamHandle) -> str:
    """Return the parameters whose gradients the unit waits for; "" if none."""
    if not handle.reduce_due:
        return ""
    arrived = [region.arrived for region in handle.trainable]
    return ", ".join(map(repr, without_gradient(handle, arrived)))


def without_gradient(
    handle: FlatParamHandle, arrived: Sequence[bytes | bytearray]
) -> list[str]:
    """Return the FQNs from the root of parameters without a gradient on this rank."""
    prefix = f"{handle.full_fqn}." if handle.full_fqn else ""
    return [
        prefix + slot.fqns[0]
        for region, hits in zip(handle.trainable, arrived, strict=True)
        # Usually every gradient has arrived; then the parameters are not visited.
        if 0 in hits
        for slot, hit in zip(region.layout.parameters, hits, strict=True)
        if not hit
    ]


def _mode_of_forward(mode: Hashable) -> str:
    """Describe the mode of a forward, in words."""
    assert isinstance(mode, tuple)
    fqn, training, grads = mode
    return (
        f"begins a forward of {quoted(fqn)} in {'training' if training else 'eval'} "
        f"mode {'with' if grads else 'without'} gradients"
    )


def _mode_of_backward(mode: Hashable) -> str:
    """Describe the mode of a backward, in words."""
    assert isinstance(mode, tuple)
    forward, syncs, epochs = mode
    of = _mode_of_forward(forward).removeprefix("begins ") if forward else "no forward"
    how = "" if all(syncs) else ", reductions off for some units"
    if not any(syncs):
        how = ", reductions off"
    if any(epochs):
        how += f", after {sum(epochs)} changes of requires_grad"
    return f"begins the backward of {of}{how}"
