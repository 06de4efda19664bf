"""The order logs of a tree: which units share one, and how their uses are worded.

Units that send over the same groups share a log, since order matters within a group. A
forward gathers over the shard group; a backward also reduces over the replicate group.
Units that send nothing in a direction are in no log of it: where forward sends nothing,
a rank may evaluate alone.
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
"""A reduction in a log: the unit, which of its sets of regions, and, by region, which
parameters had a gradient."""


def assign_order_logs(context: RuntimeContext) -> None:
    """Give each handle of a tree its two logs, and the context all of them.

    Sends nothing.
    """
    forward: dict[tuple[str, ...], OrderLog] = {}
    backward: dict[tuple[str, ...], OrderLog] = {}
    waiting = _WaitingNote(context)
    known: dict[Groups, tuple[OrderLog | None, ...]] = {}
    for handle in context.handles:
        if not any(region.layout.padded_numel for region in handle.regions):
            handle.forward_log = handle.backward_log = handle.reduce_log = None
            continue
        if handle.groups not in known:
            shard, replicate = handle.groups.shard, handle.groups.replicate
            gathers = [] if shard is None else [shard]
            reduces = gathers if replicate is None else [*gathers, replicate]
            in_forward = _log(forward, "forward", gathers, str)
            in_backward = _log(backward, "backward", reduces, waiting)
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
    if not groups:
        return None
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
    """``OrderLog.depart``, for a backward of the forward ``forward``.

    Which units reduce is part of the mode: rounds under ``no_sync`` have an order of
    their own. So is how their parameters are laid out, which freezing changes.
    """
    if log.is_open:
        # The mode is that of the round. All units have a say in it, so it is put
        # together once a round, not once a use.
        log.depart(use, ())
        return
    root = context.root()
    states = root._root_states if root is not None else ()
    syncs = tuple([state.sync_gradients for state in states])
    log.depart(use, (forward, syncs, tuple([s.handle.epoch for s in states])))


def _describe_forward_use(use: object) -> str:
    if isinstance(use, FlatParamHandle):
        # With the size, so that models of other shapes are told apart before they send.
        numel = sum(region.layout.padded_numel for region in use.regions)
        return f"runs {use.name} of {numel:,} elements{_grouping(use)}"
    return "has no further unit to run"


def _grouping(handle: FlatParamHandle) -> str:
    """How several regions divide the parameters, as a few characters.

    Answers of ``group_by`` may differ over ranks (``hash`` of a string does), and then
    all sizes may be equal.
    """
    if len(handle.regions) < 2:
        return ""
    members = [[s.fqns for s in r.layout.parameters] for r in handle.regions]
    digest = zlib.crc32(repr(members).encode())
    return f" in {len(members)} regions (grouping {digest:08x})"


def _describe_backward_use(use: object) -> str:
    if isinstance(use, FlatParamHandle):
        return f"runs the backward of {use.name}"
    if isinstance(use, tuple):
        handle, epoch, arrived = use
        if epoch != handle.epoch:
            return f"reduces the gradients of {handle.name}, grouped as they were"
        missing = [quoted(fqn) for fqn in without_gradient(handle, arrived)]
        which = NO_GRADIENT + ", ".join(missing) if missing else ""
        return f"{REDUCES}{handle.name}{which}"
    return "has no further backward or reduction"


class _WaitingNote:
    """Tells which units are in backward and wait for gradients, and for which.

    It is asked at each use of a round that is recorded, so it does not look through the
    tree: units join a graph task in turn, and most are through with it soon.
    """

    def __init__(self, context: RuntimeContext) -> None:
        self._context = weakref.ref(context)
        self._seen: dict[int, int] = {}
        """Per graph task, how many of its units were looked at."""
        self._open: dict[int, list[FlatParamHandle]] = {}
        """Those of them that waited."""

    def __call__(self) -> str:
        """A line ``unit: parameters`` each."""
        context = self._context()
        tasks = context.tasks if context is not None else {}
        (before, self._open), (seen, self._seen) = (self._open, {}), (self._seen, {})
        lines = []
        for task, states in tasks.items():
            known = before.get(task, [])
            opened = self._open[task] = []
            self._seen[task] = len(states)
            for handle in known + [s.handle for s in states[seen.get(task, 0) :]]:
                if handle.task == task and (missing := _missing(handle)):
                    opened.append(handle)
                    lines.append(f"{handle.name}: {missing}")
        return "\n".join(lines)


def _missing(handle: FlatParamHandle) -> str:
    """The parameters whose gradients the unit waits for; empty if for none."""
    if not handle.reduce_due:
        return ""
    arrived = [region.arrived for region in handle.trainable]
    return ", ".join(map(repr, without_gradient(handle, arrived)))


def without_gradient(
    handle: FlatParamHandle, arrived: Sequence[bytes | bytearray]
) -> list[str]:
    """Names, from the root, of the parameters that had no gradient on this rank."""
    prefix = f"{handle.full_fqn}." if handle.full_fqn else ""
    return [
        prefix + slot.fqns[0]
        for region, hits in zip(handle.trainable, arrived, strict=True)
        if 0 in hits
        for slot, hit in zip(region.layout.parameters, hits, strict=True)
        if not hit
    ]


def _mode_of_forward(mode: Hashable) -> str:
    assert isinstance(mode, tuple)
    fqn, training, grads = mode
    return (
        f"begins a forward of {quoted(fqn)} in {'training' if training else 'eval'} "
        f"mode {'with' if grads else 'without'} gradients"
    )


def _mode_of_backward(mode: Hashable) -> str:
    assert isinstance(mode, tuple)
    forward, syncs, epochs = mode
    of = _mode_of_forward(forward).removeprefix("begins ") if forward else "no forward"
    how = "" if all(syncs) else ", reductions off for some units"
    if not any(syncs):
        how = ", reductions off"
    if any(epochs):
        how += f", after {sum(epochs)} changes of requires_grad"
    return f"begins the backward of {of}{how}"
