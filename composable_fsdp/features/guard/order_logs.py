"""The order logs of a tree: which units share a log, and the facts that logs compare.

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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.comm.groups import GroupRef, Groups
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import record
from composable_fsdp.features.guard.meetings import history_of
from composable_fsdp.features.guard.order_compare import (
    BEGINS,
    Fact,
    LogWords,
    OrderComparison,
)
from composable_fsdp.features.guard.order_log import OrderLog, round_order
from composable_fsdp.features.guard.same_models import compare_models
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.use_order import NO_LOGS, UnitLogs
from composable_fsdp.naming import listed, quoted
from composable_fsdp.tree.initial_weights import ALL_RANKS
from composable_fsdp.tree.state import RuntimeContext, _RootFSDPState


def compare_ranks(context: RuntimeContext, root: _RootFSDPState) -> None:
    """Compare the ranks of a tree; begin the order logs.

    Collective, Raises: as ``compare_models``.
    """
    before = root.initial.compared
    # If a forward gathers nothing, a rank may run the forward alone, also with
    # gradients that are not reduced (``no_sync``). So replicas are compared in the
    # first forward that leads to a reduction.
    reduces = any(unit.settings.sync_gradients for unit in root._root_states)
    compare_models(root, replicas=reduces and torch.is_grad_enabled())
    after = root.initial.compared
    if not context.is_checked or after != before:
        # Not before the comparison: other models may have other logs, and the ranks
        # would number all later logs otherwise.
        _assign_order_logs(context, root, replicas=after == ALL_RANKS)


def _assign_order_logs(
    context: RuntimeContext, root: _RootFSDPState, *, replicas: bool
) -> None:
    """Assign the order logs of each unit of a tree; collect all logs in ``context``.

    Ranks number the logs of a group, so the ranks of a log must have compared their
    models before. Without ``replicas`` units that are not cut have no logs yet.
    """
    forward: dict[tuple[str, ...], OrderLog] = {}
    backward: dict[tuple[str, ...], OrderLog] = {}
    waiting = partial(_missing_gradients, weakref.ref(context))
    tree = type(root.module).__name__
    call = Call("forward", root.title)
    known: dict[Groups, UnitLogs] = {}
    for handle in context.handles:
        # A unit without elements sends no collective.
        if not any(region.layout.padded_numel for region in handle.layout.regions):
            handle.logs = NO_LOGS
            continue
        if handle.groups.shard is None and not replicas:
            continue
        # Units with the same ``Groups`` object share the logs without another lookup.
        if handle.groups not in known:
            shard = handle.groups.shard
            gathers = [] if shard is None else [shard]
            in_forward = _log(forward, "forward", tree, gathers, str, call)
            both = handle.groups.present
            in_backward = _log(backward, "backward", tree, both, waiting)
            # Without a shard group there is no all-gather, but gradients are reduced
            # over the replicate group.
            gathered = in_backward if gathers else None
            known[handle.groups] = UnitLogs(in_forward, gathered, in_backward)
        handle.logs = known[handle.groups]
    present = dict.fromkeys(g for groups in known for g in groups.present)
    # A replica may evaluate alone, and would wait for the others.
    shards = dict.fromkeys(g.shard for g in known if g.shard is not None)
    record(shards, agree=True)
    record(present, agree=replicas)
    for log in (*forward.values(), *backward.values()):
        own = [peers.group for peers in log.comparison.peers]
        # Groups of a fake world are not watched, and a log has no peers there.
        log.comparison.elsewhere = tuple(
            GroupRef(group) for group in present if own and group not in own
        )
    context.forward_logs = tuple(forward.values())
    context.backward_logs = tuple(backward.values())


def _log(
    logs: dict[tuple[str, ...], OrderLog],
    what: str,
    tree: str,
    groups: Sequence[dist.ProcessGroup],
    waiting: Callable[[], str],
    call: Call | None = None,
) -> OrderLog | None:
    """Return the log for ``groups``, created at the first call; None without groups."""
    if not groups:
        return None
    # Units may have equal groups in different ``Groups`` objects.
    key = tuple(group.group_name for group in groups)
    if key not in logs:
        rounds = round_order(groups)
        name = f"a {what} of {tree} (order log {len(rounds.logs)})"
        is_forward = what == "forward"
        use = _forward_use if is_forward else _backward_use
        mode = _forward_begin if is_forward else _backward_begin
        # All ranks come here, and some may use the store later without the others.
        peers = [Peers(g, what) for g in groups if can_compare(g)]
        words = LogWords(what, name, use, mode, waiting)
        comparison = OrderComparison(peers, words)
        # Without ranks to compare with, no call meets.
        calls = history_of(groups[0]) if call is not None and peers else None
        logs[key] = OrderLog(name, rounds, comparison, call, calls)
    return logs[key]


def _forward_use(use: FlatParamHandle | None) -> Fact:
    """Return the fact of a use in forward."""
    if use is None:
        return Fact("has no further unit to run")
    # The size lets ranks with models of different shapes raise before a collective.
    regions = use.layout.regions
    numel = sum(region.layout.padded_numel for region in regions)
    does = f"runs {use.name} of {numel:,} elements"
    if len(regions) > 1:
        # ``group_by`` may return different groups on different ranks (for example
        # ``hash`` of a string); the sizes may be equal in spite of that.
        members = [[s.fqns for s in r.layout.parameters] for r in regions]
        digest = zlib.crc32(repr(members).encode())
        does += f" in {len(regions)} regions (grouping {digest:08x})"
    return Fact(does)


def _backward_use(use: Any) -> Fact:
    """Return the fact of a use in backward."""
    if use is None:
        return Fact("has no further backward or reduction")
    if isinstance(use, FlatParamHandle):
        return Fact(f"runs the backward of {use.name}")
    handle, structure, arrived = use
    does = f"reduces the gradients of {handle.name}"
    # The unit was rebuilt since, so the flags no longer match its regions.
    if structure != handle.layout.structure:
        return Fact(f"{does}, grouped as they were")
    missing = without_gradient(handle, arrived)
    named = tuple([f"no gradient for {quoted(name)}" for name in missing])
    return Fact(does, named=named)


def _forward_begin(mode: Any) -> Fact:
    """Return the fact of the begin of a forward."""
    fqn, training, grads, changed = mode
    how = "training" if training else "eval", "with" if grads else "without"
    of = f"a forward of {quoted(fqn)} in {how[0]} mode {how[1]} gradients"
    return Fact(f"begins {of}", BEGINS, of, _flags(changed))


def _backward_begin(mode: Any) -> Fact:
    """Return the fact of the begin of a backward."""
    forward, syncs, structures, changed = mode
    of = _forward_begin(forward).of if forward else "no forward"
    does = f"begins the backward of {of}"
    # Without a root there are no units, and no reductions.
    if not all(syncs) or not syncs:
        does += f", reductions off{' for some units' if any(syncs) else ''}"
    if rebuilt := sum(map(bool, structures)):
        digest = zlib.crc32(repr(structures).encode())
        does += f", with requires_grad changed in {rebuilt} units ({digest:08x})"
    return Fact(does, BEGINS, of, _flags(changed))


def _flags(changed: Iterable[Sequence[Any]]) -> tuple[str, ...]:
    """Return the entries of ``RuntimeContext.changed_flags`` in words."""
    return tuple(
        [
            name if trains is None else f"requires_grad={trains} of {quoted(name)}"
            for name, trains, *_ in changed
        ]
    )


def _missing_gradients(ref: weakref.ref[RuntimeContext]) -> str:
    """Return for which gradients the units in backward wait, for errors."""
    context, missing = ref(), list[str]()
    for task, states in context.tasks.items() if context is not None else ():
        for handle in [state.handle for state in states]:
            # The unit may have joined another graph task since.
            if handle.backward.task == task and handle.reduction.due:
                arrived = [region.reduce.arrived for region in handle.layout.trainable]
                missing += without_gradient(handle, arrived)
    return f" and has no gradient yet for {listed(map(quoted, missing))}" * any(missing)


def without_gradient(
    handle: FlatParamHandle, arrived: Sequence[bytes | bytearray]
) -> list[str]:
    """Return the FQNs from the root of parameters without a gradient on this rank."""
    return [
        slot_path(handle, slot)
        for region, hits in zip(handle.layout.trainable, arrived, strict=True)
        # Usually every gradient has arrived; then the parameters are not visited.
        if 0 in hits
        for slot, hit in zip(region.layout.parameters, hits, strict=True)
        if not hit
    ]
