"""The order in which a tree uses its units, on this rank.

A *round* is a forward or a backward. The first round of a mode (training or evaluation,
...) records the uses of units. Later rounds are compared with the record::

    if log.expected[log.position] is unit:
        log.position += 1
    else:
        log.depart(unit, mode)

Only a rank without a matching entry communicates (``order_compare``)::

    this rank              its next use    action
    follows the record     as recorded     nothing is sent, no wait
    follows the record     another use     depart: meet all ranks in the store, who must
                                           have departed to the same use
    records                any             exchange a tag of the use with all ranks
    varies (departed       any             exchange a tag of all uses at the end of the
    twice), or captures                    round

Units that send over the same process groups share a log, because the order of
collectives matters within a group: in forward all-gathers (over the shard group), in
backward all-gathers and reductions (over both). A unit that sends nothing in a
direction has no log there, so if forward sends nothing, a rank may evaluate alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef, Groups
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import note_thread, record
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.order import Order, order_over
from composable_fsdp.features.guard.order_compare import (
    BEGIN,
    END,
    OrderComparison,
    missing_gradients,
)
from composable_fsdp.features.guard.same_models import compare_models
from composable_fsdp.flat.use_order import NO_LOGS, UnitLogs
from composable_fsdp.tree.initial_weights import ALL_RANKS
from composable_fsdp.tree.state import RuntimeContext, _RootFSDPState

NOTHING: Sequence[object] = (None,)
"""The record of a round without a record: ``None`` is no use, so no use matches."""
_STEADY = 4
"""Number of equal rounds after which a mode whose order varied is recorded again."""
_MOST_MODES = 64
"""Number of modes whose orders are kept, the latest."""


class Record:
    """The order of a mode."""

    __slots__ = ("departures", "equal", "since", "uses")

    def __init__(self) -> None:
        # The recorded uses, then ``None``; None before the first round has ended.
        self.uses: list[object] | None = None
        self.since = 0  # the round in which the record was made
        self.departures = 0  # on all ranks alike; from 2 on the order varies
        self.equal = 0  # equal rounds in a row, while the order varies

    def update(self, uses: list[object], number: int) -> None:
        """Make the uses of a round the recorded uses."""
        if self.departures > 1:
            self.equal = self.equal + 1 if uses == self.uses else 0
            if self.equal >= _STEADY:
                self.departures = self.equal = 0
        self.uses, self.since = uses, number


class OrderLog:
    """The order of uses in a direction (forward or backward) over process groups."""

    __slots__ = (
        *("_at_end", "_entries", "_mode", "_open", "_record", "_recording"),
        *("_records", "comparison", "expected", "number", "order", "position"),
        "round",
    )

    def __init__(self, name: str, order: Order, comparison: Any) -> None:
        self.order, self.comparison = order, comparison  # an ``OrderComparison``
        self.number = len(order.logs)  # among the logs over its group
        order.logs.append(name)
        self.round = 0  # the number of the current round, or of the last
        self.expected: Sequence[object] = NOTHING
        """The recorded uses of this round, then ``None``."""
        self.position = 0
        """Index of the next use in ``expected``."""
        self._open = self._recording = False
        self._at_end = False  # the uses of this round are compared at its end
        self._entries: list[object] = []  # uses, while this rank records
        self._records: dict[Hashable, Record] = {}  # by mode
        self._record = Record()  # of the mode of this round
        self._mode: Hashable = None  # of the current round, or of the last

    @property
    def is_open(self) -> bool:
        """Whether a round is in progress."""
        return self._open

    @property
    def peers(self) -> Sequence[Any]:
        """The ranks of each group, a ``Peers`` each."""
        peers: Sequence[Any] = self.comparison.peers
        return peers

    def depart(self, use: object, mode: Hashable) -> None:
        """Record a use that is not the expected use; call before its collective.

        The first use of a round always calls this method, which begins the round.
        ``mode`` is read only then.

        Collective: while a round is recorded, one all-gather of 8 bytes. If a record is
            left, none: waits for the other ranks in the store, for a limited time.
        Raises: DesyncError, if another rank does something else.
        """
        # The first use of a round has no record to compare with until the mode is
        # known.
        if not self._open:
            self._begin(mode)
            if self.expected[self.position] == use:
                self.position += 1
                return
        if not self._recording:
            # From here on this rank records; the uses so far equal the old record.
            wanted, index = self.expected[self.position], self.position
            self._entries = list(self.expected[:index])
            self.expected, self.position, self._recording = NOTHING, 0, True
            since = self._record.since
            self.comparison.depart(self.round, f"use {index}", use, wanted, since=since)
            self._record.departures += 1
        elif not self._at_end:
            self._compare(f"use {len(self._entries)}", [use])
        self._entries.append(use)

    def _compare(self, at: str, values: Sequence[object]) -> None:
        """Compare with all ranks, which raise together."""
        try:
            self.comparison.compare(self.round, at, values)
        except DesyncError:
            # No rank waits for another, so that the next round needs no meeting.
            self._close()
            raise

    def end(self) -> None:
        """End the round, if a round is in progress.

        Collective, Raises: as ``depart``; fewer uses than recorded are a departure.
        """
        if not self._open:
            return
        if self._recording or self.expected[self.position] is not None:
            self.depart(None, None)
            if self._at_end:
                self._compare(END, self._entries)
            self._record.update(self._entries, self.round)
            # The newest entry comes last, and the oldest goes.
            self._records.pop(self._mode, None)
            self._records[self._mode] = self._record
            if len(self._records) > _MOST_MODES:
                del self._records[next(iter(self._records))]
        self._close()

    def drop(self) -> None:
        """Abandon the round in progress, if any; the records stay as they were.

        If the round has further uses, the next round over the group begins by a meeting
        of all ranks.
        """
        # The number of further uses is not known while this rank records.
        if self._recording or (self._open and self.expected[self.position] is not None):
            uses = len(self._entries) if self._recording else self.position
            self.order.raised[self.number] = self.round, uses
        self._close()

    def _close(self) -> None:
        """Leave the round that has ended or was abandoned."""
        self._open = self._recording = self._at_end = False
        self.expected, self.position = NOTHING, 0

    def _begin(self, mode: Hashable) -> None:
        """Begin a round: compare its begin with the expected begin, find the record."""
        order = self.order
        note_thread(order.threads)
        self.round += 1
        self._open = True
        if order.raised:
            self.comparison.meet_after_raise(self.round, order.raised)
            order.raised.clear()
        self._compare_begin(mode, order.expected())
        order.note((self.number, mode))
        self._mode, self._entries = mode, []
        self._record = record = self._records.get(mode) or Record()
        varies = record.departures > 1
        self._recording = varies or record.uses is None
        # What is captured is not sent before the capture has ended.
        self._at_end = self._recording and (varies or is_capturing())
        self.expected = NOTHING if self._recording else record.uses or NOTHING
        self.position = 0

    def _compare_begin(self, mode: Hashable, expected: Any) -> None:
        """Compare the begin of a round, unless it is ``expected`` on all ranks."""
        if expected is None:
            return self._compare(BEGIN, [mode])
        number, recorded = (None, None) if isinstance(expected, Call) else expected
        # Ranks that begin what they expect send nothing, so this rank has to wait for
        # all ranks to begin the same round.
        if number != self.number:
            other = expected.story if number is None else self.order.logs[number]
            self.comparison.depart(self.round, BEGIN, mode, other=other)
        elif recorded != mode:
            since = self.round - 1
            self.comparison.depart(self.round, BEGIN, mode, recorded, since=since)


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
    waiting = partial(missing_gradients, weakref.ref(context))
    tree = type(root.module).__name__
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
            in_forward = _log(forward, "forward", tree, gathers, str)
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
) -> OrderLog | None:
    """Return the log for ``groups``, created at the first call; None without groups."""
    if not groups:
        return None
    # Units may have equal groups in different ``Groups`` objects.
    key = tuple(group.group_name for group in groups)
    if key not in logs:
        order = order_over(groups)
        name = f"a {what} of {tree} (order log {len(order.logs)})"
        # All ranks come here, and some may use the store later without the others.
        peers = [Peers(group, what) for group in groups if can_compare(group)]
        comparison = OrderComparison(peers, what, name, waiting)
        logs[key] = OrderLog(name, order, comparison)
    return logs[key]
