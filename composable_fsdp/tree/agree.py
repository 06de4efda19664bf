"""The order logs of a tree: which units share one, and how their uses are worded.

Units that send over the same groups share a log, since order matters within a group. A
forward gathers over the shard group; a backward also reduces over the replicate group.
Units that send nothing in a direction are in no log of it: where forward sends nothing,
a rank may evaluate alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import torch.distributed as dist

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.comm.order_log import REDUCES, WITHOUT, OrderLog
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.naming import join, shown
from composable_fsdp.tree.state import RuntimeContext

Reduced = tuple[FlatParamHandle, int, tuple[bytes, ...]]
"""A reduction in a log: the unit, which of its sets of regions, and, by region, which
parameters had a gradient."""


def give_logs(
    handles: Sequence[FlatParamHandle],
) -> tuple[tuple[OrderLog, ...], tuple[OrderLog, ...]]:
    """Give each handle its two logs; all forward logs, all backward logs. Sends
    nothing.
    """
    forward: dict[tuple[str, ...], OrderLog] = {}
    backward: dict[tuple[str, ...], OrderLog] = {}
    for handle in handles:
        shard, replicate = handle.groups.shard, handle.groups.replicate
        sized = any(region.layout.padded_numel for region in handle.regions)
        gathers = [shard] if shard is not None and sized else []
        reduces = [replicate] if replicate is not None and sized else []
        handle.forward_log = _log(forward, "forward", gathers, handles)
        handle.reduce_log = _log(backward, "backward", gathers + reduces, handles)
        handle.backward_log = handle.reduce_log if gathers else None
    return tuple(forward.values()), tuple(backward.values())


def _log(
    logs: dict[tuple[str, ...], OrderLog],
    what: str,
    groups: Sequence[dist.ProcessGroup],
    handles: Sequence[FlatParamHandle],
) -> OrderLog | None:
    if not groups:
        return None
    key = tuple(group.group_name for group in groups)
    if key not in logs:
        peers = [Peers(group, what) for group in groups if can_compare(group)]
        tell = _tell_forward if what == "forward" else _tell_backward
        tell_mode = _mode_of_forward if what == "forward" else _mode_of_backward
        note = partial(_waiting, handles) if what == "backward" else str
        logs[key] = OrderLog(what, peers, tell, tell_mode, note)
    return logs[key]


def depart_in_backward(
    context: RuntimeContext,
    log: OrderLog,
    use: FlatParamHandle | Reduced,
    forward: Hashable = (),
) -> None:
    """``OrderLog.depart``, for a backward of the forward ``forward``.

    Which units reduce is part of the mode: rounds under ``no_sync`` have an order of
    their own. So is how their parameters are laid out, which freezing changes.
    """
    root = context.root()
    states = root._root_states if root is not None else ()
    syncs = tuple([state.sync_gradients for state in states])
    log.depart(use, (forward, syncs, tuple([s.handle.epoch for s in states])))


def _tell_forward(use: object) -> str:
    if isinstance(use, FlatParamHandle):
        return f"runs {use.name}"
    return "has no further unit to run"


def _tell_backward(use: object) -> str:
    if isinstance(use, FlatParamHandle):
        return f"runs the backward of {use.name}"
    if isinstance(use, tuple):
        handle, epoch, arrived = use
        if epoch != handle.epoch:
            return f"reduces the gradients of {handle.name}, grouped as they were"
        missing = [shown(fqn) for fqn in without_gradient(handle, arrived)]
        which = WITHOUT + ", ".join(missing) if missing else ""
        return f"{REDUCES}{handle.name}{which}"
    return "has no further backward or reduction"


def _waiting(handles: Sequence[FlatParamHandle]) -> str:
    """Units that are in backward and wait for gradients, and for which."""
    lines = []
    for handle in handles:
        if handle.task != NO_TASK and handle.reduce_is_allocated:
            arrived = tuple(bytes(region.arrived) for region in handle.trainable)
            missing = [shown(fqn) for fqn in without_gradient(handle, arrived)]
            if missing:
                lines.append(f"{handle.name}: {', '.join(missing)}")
    return "\n".join(lines)


def without_gradient(
    handle: FlatParamHandle, arrived: tuple[bytes, ...]
) -> Iterable[str]:
    """Names, from the root, of the parameters that had no gradient on this rank."""
    for region, hits in zip(handle.trainable, arrived, strict=True):
        for slot, hit in zip(region.layout.parameters, hits, strict=True):
            if not hit:
                yield join(handle.full_fqn, slot.fqns[0])


def _mode_of_forward(mode: Hashable) -> str:
    assert isinstance(mode, tuple)
    fqn, training, grads = mode
    return (
        f"begins a forward of {shown(fqn)} in {'training' if training else 'eval'} "
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
