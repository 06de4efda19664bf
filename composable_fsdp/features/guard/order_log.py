"""The order in which a tree uses its units, on this rank.

A *round* is a forward or a backward. The first round of a mode (training or evaluation,
...) records the uses of units. Later rounds are compared with the record::

    if log.expected[log.position] is unit:
        log.position += 1
    else:
        log.depart(unit, mode)

Ranks that issue collectives in different orders deadlock or exchange wrong data, so a
rank without a matching entry communicates. A ``DesyncError`` names both orders::

    this rank              its next use    action
    follows the record     as recorded     nothing is sent, no wait
    follows the record     another use     depart: meet all ranks in the store, who must
                                           have departed to the same use
    records                any             exchange a tag of the use with all ranks, and
                                           the facts only if tags differ
    varies (departed       any             exchange a tag of all uses at the end of the
    twice), or captures                    round

Units that send over the same process groups share a log, because the order of
collectives matters within a group: in forward all-gathers (over the shard group), in
backward all-gathers and reductions (over both). A unit that sends nothing in a
direction has no log there, so if forward sends nothing, a rank may evaluate alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import can_compare
from composable_fsdp.comm.device import is_capturing
from composable_fsdp.comm.groups import GroupRef, Groups
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import (
    leave,
    note_thread,
    operation_log,
    record,
)
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.compare import (
    SAME_CALLS,
    Announcement,
    gather,
    tag_of,
)
from composable_fsdp.features.guard.meetings import history_of
from composable_fsdp.features.guard.order import MOST_EVENTS, Order, order_over
from composable_fsdp.features.guard.order_words import (
    BEGIN,
    END,
    ONE_RANK_RAISED,
    Told,
    backward_fact,
    contrast,
    difference,
    forward_fact,
    missing_gradients,
    way_out,
)
from composable_fsdp.features.guard.same_models import compare_models
from composable_fsdp.features.guard.watch import require_unbroken
from composable_fsdp.flat.use_order import NO_LOGS, UnitLogs
from composable_fsdp.naming import listed
from composable_fsdp.tree.initial_weights import ALL_RANKS
from composable_fsdp.tree.state import RuntimeContext, _RootFSDPState

NOTHING: Sequence[object] = (None,)
"""The record of a round without a record: ``None`` is no use, so no use matches."""
_STEADY = 4
"""Number of equal rounds after which a mode whose order varied is recorded again."""
_MOST_MODES = 64
"""Number of modes whose orders are kept, the latest."""


@dataclass(slots=True)
class Record:
    """The order of a mode."""

    uses: list[object] | None = None  # then ``None``; None before the first round ended
    since: int = 0  # the round in which the record was made
    departures: int = 0  # on all ranks alike; from 2 on the order varies
    equal: int = 0  # equal rounds in a row, while the order varies

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
        *("_at_end", "_entries", "_fact", "_groups", "_mode", "_name", "_record"),
        *("_recording", "_records", "_waiting", "_what", "elsewhere", "expected"),
        *("is_open", "number", "order", "position", "round", "threads"),
    )

    def __init__(
        self,
        what: str,
        tree: str,
        order: Order,
        groups: Sequence[GroupRef] = (),
        waiting: Callable[[], str] = str,
    ) -> None:
        self.order, self._groups = order, tuple(groups)
        # Whose ranks this one compares with; empty if none can.
        self.number = len(order.logs)  # among the logs over its group
        self._what = what  # "forward" or "backward"
        self._name = f"a {what} of {tree} (order log {self.number})"
        order.logs.append(self._name)
        self._fact = forward_fact if what == "forward" else backward_fact
        self._waiting = waiting  # for which gradients units wait, for errors
        self.elsewhere: tuple[GroupRef, ...] = ()
        """The other groups of the tree, whose ranks would wait for this rank."""
        self.threads: list[set[Thread]] = []
        """By group over which a round sends: the threads that have sent."""
        self.round = 0  # the number of the current round, or of the last
        self.expected: Sequence[object] = NOTHING
        """The recorded uses of this round, then ``None``."""
        self.position = 0
        """Index of the next use in ``expected``."""
        self.is_open = self._recording = False  # whether a round is in progress
        self._at_end = False  # the uses of this round are compared at its end
        self._entries: list[object] = []  # uses, while this rank records
        self._records: dict[Hashable, Record] = {}  # by mode
        self._record = Record()  # of the mode of this round
        self._mode: Hashable = None  # of the current round, or of the last

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
        if not self.is_open:
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
            self._announce(f"use {index}", use, wanted, since=since)
            self._record.departures += 1
        elif not self._at_end:
            self._compare(f"use {len(self._entries)}", [use])
        self._entries.append(use)

    def end(self) -> None:
        """End the round, if a round is in progress.

        Collective, Raises: as ``depart``; fewer uses than recorded are a departure.
        """
        if not self.is_open:
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
        if self._recording or (
            self.is_open and self.expected[self.position] is not None
        ):
            uses = len(self._entries) if self._recording else self.position
            self.order.raised[self.number] = self.round, uses
        self._close()

    def _close(self) -> None:
        """Leave the round that has ended or was abandoned."""
        self.is_open = self._recording = self._at_end = False
        self.expected, self.position = NOTHING, 0

    def _begin(self, mode: Hashable) -> None:
        """Begin a round: compare its begin with the expected begin, find the record."""
        order = self.order
        for threads in self.threads:
            note_thread(threads)
        self.round += 1
        self.is_open = True
        if order.raised:
            # A rank that has not abandoned the same rounds at the same uses would be in
            # a collective of such a round, with which the next of this rank would pair.
            what, logs = self._what, sorted(order.raised.items())
            ended = " and ".join(f"{what} {r} at use {uses}" for _, (r, uses) in logs)
            does = f"begins {what} {self.round} after an exception that ended {ended}"
            self._meet(BEGIN, ("raised", logs), does, ONE_RANK_RAISED)
            order.raised.clear()
        events, event = order.events, (self.number, mode)
        # As ``Order.note``, without a call: all ranks begin this round.
        if order.at and events[order.at] == event and len(events) < MOST_EVENTS:
            events.append(events[order.at])
            order.at += 1
        else:
            self._compare_begin(mode, order.expected())
            order.note(event)
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
        # Ranks that begin what they expect send nothing, so this rank has to wait for
        # all ranks to begin the same round.
        if isinstance(expected, Call):
            return self._announce(BEGIN, mode, other=expected.story, cure=SAME_CALLS)
        number, recorded = expected
        if number != self.number:
            self._announce(BEGIN, mode, other=self.order.logs[number])
        elif recorded != mode:
            self._announce(BEGIN, mode, recorded, since=self.round - 1)

    def _compare(self, at: str, values: Sequence[Any]) -> None:
        """Compare with all ranks, which raise together."""
        try:
            self._exchange(at, values)
        except DesyncError:
            # No rank waits for another, so that the next round needs no meeting.
            self._close()
            raise

    def _exchange(self, at: str, values: Sequence[Any]) -> None:
        """Compare a use, a mode (at ``BEGIN``) or all uses (at ``END``) of all ranks.

        Collective: an all-gather of 8 bytes over each group; if tags
            differ, an all-gather of objects.
        """
        if not self._groups:
            return
        # No comprehension, which is a call: each use of the first step comes here.
        facts = tuple(map(self._fact, values, [at] * len(values)))
        # The host cannot read a tag during the capture of a CUDA graph.
        if is_capturing():
            return self._meet(at, facts, listed(f for f, *_ in facts), way_out(at))
        # The name tells trees apart that share the group and the names of units.
        tag = tag_of((self._what, self._name, at, *facts))
        unlike: list[dist.ProcessGroup] = []
        for group in [each.get() for each in self._groups]:
            # After a difference in a group, this rank sends another tag to the next, so
            # that the ranks there raise, too, and do not wait for this rank.
            tags = collectives.all_gather_tag(~tag if unlike else tag, group)
            if tags.count(tags[0]) != len(tags):
                unlike.append(group)
        if not unlike:
            return
        # All ranks of these groups have seen the difference, so all exchange objects.
        mine = Told(facts, self._place(at), self._waiting())
        for told in [gather(mine, [group]) for group in unlike]:
            # The rounds of ranks may have other numbers.
            if len({(each.facts, each.place[1]) for each in told.values()}) > 1:
                self._raise(difference(told, at))
        self._raise(
            f"Ranks of another process group disagree in {mine.place[0]}: see the "
            "error of the other ranks."
        )

    def _announce(
        self,
        at: str,
        value: Any,
        wanted: Any = None,
        *,
        since: int = 0,
        other: str = "",
        cure: str = "",
    ) -> None:
        """Meet all ranks at a value other than ``wanted``, as in round ``since``."""
        if not self._groups:
            return
        fact = self._fact(value, at)
        if other:
            does = f"{fact[0]}, where the order of earlier rounds has {other}"
        else:
            mine, recorded = contrast(fact, self._fact(wanted, at))
            does = (
                f"{mine}{self._waiting()}, where the order recorded in {self._what} "
                f"{since} has: {recorded}"
            )
        self._meet(at, fact, does, cure or way_out(at))

    def _place(self, at: str) -> tuple[str, str]:
        return f"{self._what} {self.round}, at {at}", self._name

    def _meet(self, at: str, facts: tuple[Any, ...], does: str, cure: str) -> None:
        """Wait until every rank has come to the place with the same facts, too."""
        announced = Announcement(does, cure, self._place(at), facts)
        groups = [each.get() for each in self._groups]
        for group in groups:
            require_unbroken(group)
        try:
            for met in groups:
                history_of(met).gather(announced)
        except DesyncError as error:
            text = str(error.args[0])
            # Other ranks may follow the record and wait in a collective for this rank.
            for group in groups:
                if not (error.is_known_to_all and group is met):
                    leave(group, text)
            self._raise(text)

    def _raise(self, text: str) -> NoReturn:
        """Raise ``text``, which the ranks of its groups know, also in other groups."""
        # Of hybrid sharding, the other replicas have seen no difference in forward, and
        # wait for this rank in the reductions.
        for each in self.elsewhere:
            if (group := each.ref()) is not None:
                leave(group, text)
        raise DesyncError(text) from None


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
    """Assign the order logs of each unit of a tree; collect all logs in ``context``."""
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
        groups = handle.groups
        if groups.shard is None and not replicas:
            continue
        # Units with the same ``Groups`` object share the logs without another lookup.
        if groups not in known:
            gathers = [*filter(None, [groups.shard])]
            in_forward = _log(forward, "forward", tree, gathers, str)
            in_backward = _log(backward, "backward", tree, groups.present, waiting)
            # Without a shard group there is no all-gather, but gradients are reduced
            # over the replicate group.
            gathered = in_backward if gathers else None
            known[groups] = UnitLogs(in_forward, gathered, in_backward)
            _note_threads(in_forward, groups.gathering)
            _note_threads(in_backward, groups.sending)
        handle.logs = known[groups]
    sending = dict.fromkeys(g for groups in known for g in groups.sending)
    # A replica may evaluate alone, and would wait for the others.
    record(dict.fromkeys(g for each in known for g in each.gathering), agree=True)
    record(sending, agree=replicas)
    for each in (*forward.values(), *backward.values()):
        own = [ref.get() for ref in each._groups]
        # Groups of a fake world are not watched, and a log has no groups there.
        each.elsewhere = tuple(
            GroupRef(group) for group in sending if own and group not in own
        )
    context.forward_logs = tuple(forward.values())
    context.backward_logs = tuple(backward.values())


def _note_threads(log: OrderLog | None, groups: Iterable[dist.ProcessGroup]) -> None:
    """Let the rounds of ``log`` note their thread in the logs of ``groups``."""
    if log is None:
        return
    for group in groups:
        threads = operation_log(group).threads
        # By identity: sets may be equal and not the same.
        if not any(each is threads for each in log.threads):
            log.threads.append(threads)


def _log(
    logs: dict[tuple[str, ...], OrderLog],
    what: str,
    tree: str,
    groups: Sequence[dist.ProcessGroup],
    waiting: Callable[[], str],
) -> OrderLog | None:
    """Return the log for ``groups``, created at the first call; None without groups."""
    # Units may have equal groups in different ``Groups`` objects.
    key = tuple([group.group_name for group in groups])
    if groups and key not in logs:
        refs = [GroupRef(group) for group in groups if can_compare(group)]
        logs[key] = OrderLog(what, tree, order_over(groups), refs, waiting)
    return logs.get(key)
