"""Calls meet before they send: all ranks make the same call, or each raises.

A call announces itself in the key-value store and waits, for a limited time, for equal
calls of the others. Programs repeat themselves: with ``always=False`` a call that
follows the same history as last time visits no store. Ranks have equal histories, so
each knows what the others expect.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable_fsdp.comm import agreement
from composable_fsdp.comm.groups import operation_log
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import note_thread
from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.compare import Announcement, disagreement, tag_of
from composable_fsdp.features.guard.watch import StoreWait, agree_on_name

MOST_EVENTS = 1 << 15
"""Number of events after which an ``Order`` forgets them, on all ranks alike."""
_numbers: Counter[str] = Counter()
"""Number of meetings per group that this rank has been at, by the group's name."""
_ended: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()
"""Prefixes of keys of meetings that have ended."""


class Order:
    """What the ranks of some groups begin, one after another: rounds, and calls."""

    __slots__ = ("at", "events", "names", "raised")

    def __init__(self, first: Order | None = None) -> None:
        # Shared with the ``first`` order that has the same first group.
        self.names: list[str] = [] if first is None else first.names
        """The names of the order logs over the first group."""
        self.raised: list[str] = [] if first is None else first.raised
        """The rounds that were abandoned, in which other ranks may wait."""
        self.events: list[Hashable] = []
        """Calls, and of each round its log's name and its mode."""
        self.at = 0  # index of the event that is expected next; 0 for none

    def expected(self) -> Any:
        """Return the event that is expected next; None without experience."""
        return self.events[self.at] if self.at else None

    def note(self, event: Hashable) -> None:
        """Append ``event``, which all ranks share."""
        events = self.events
        if len(events) == MOST_EVENTS:
            self.forget()
        if self.at and events[self.at] == event:
            self.at += 1
        else:
            same = (i for i in reversed(range(len(events))) if events[i] == event)
            self.at = next(same, -1) + 1
        # The object from before: modes name all units, and thousands are kept.
        events.append(events[self.at - 1] if self.at else event)

    def forget(self) -> None:
        """Forget all events."""
        self.events.clear()
        self.at = 0

    def told(self) -> list[object]:
        """Return the history in the form in which ranks compare it."""
        # The latest are enough: after a difference the numbers of events rarely agree.
        numbers: dict[int, int] = {}
        latest = [numbers.setdefault(id(e), len(numbers)) for e in self.events[-64:]]
        return [self.at, len(self.events), *latest]


_orders: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], Order]] = (
    WeakKeyDictionary()
)


def order_over(groups: Sequence[dist.ProcessGroup]) -> Order:
    """Return the order of the rounds and calls over ``groups``."""
    # An order for each choice of groups: all ranks that compare must have the same
    # experience, and a replica may evaluate alone, or freeze what others train. By the
    # object and not by the name: a group that was made again has a new history.
    found = _orders.setdefault(groups[0], {})
    key = tuple([group.group_name for group in groups])
    if key not in found:
        found[key] = Order(next(iter(found.values()), None))
    return found[key]


def meet_in_store(
    groups: Iterable[dist.ProcessGroup], call: Call, *, always: bool
) -> None:
    """Do as ``comm.meeting.meet``."""
    # One group after the other, in the same order on all ranks: a rank that raised at
    # the first group is missing at the second, whose ranks then raise, too.
    for group in filter(agreement.can_compare, groups):
        order = order_over([group])
        if always or order.expected() != call:
            announce(group, call)
        order.note(call)


def announce(group: dist.ProcessGroup, call: Call) -> None:
    """Wait for equal calls of all ranks; the order of calls does not have it."""
    announced = Announcement(f"is in {call.story}", call.way_out)
    meet_ranks(group, announced, order_over([group]))


def meet_ranks(group: dist.ProcessGroup, announced: Announcement, order: Order) -> None:
    """Meet all ranks of the group in the store. Raises: DesyncError."""
    note_thread(operation_log(group).threads)
    if why := agree_on_name(group, announced.does):
        raise announced.alone(why)
    # A caught error on one rank leaves another history there, and such a rank would
    # not expect what the others do. So the ranks compare histories, too.
    meeting = _Meeting(group, announced, order.told())
    error: DesyncError | None = None
    try:
        meeting.arrive()
        with StoreWait(group, announced.does, announced.way_out) as wait:
            # Before all ranks are here: ranks that differ need not wait for others.
            while not (error := meeting.difference()) and meeting.is_awaited():
                why = wait.pause(meeting.missing)
                # The last rank may have come in between.
                if why and meeting.gives_up():
                    raise announced.alone(why)
                meeting.look()
    # What was announced is taken back on any exception, as Ctrl-C: other ranks must
    # not rely on this one.
    except BaseException:
        with suppress(RuntimeError):
            if not meeting.gives_up():
                meeting.end()
        raise
    # Also after a difference: a rank that comes later finds the announcements of
    # this meeting, raises the same error, and is then at the next meeting, too.
    meeting.end()
    if error is not None:
        # Where all ranks raise, a program that catches the error may go on.
        error.is_known_to_all = not meeting.is_awaited()
        raise error
    if not meeting.is_equal():
        # Only the histories differ, and all ranks forget theirs: they expect alike
        # again, and the next steps meet in the store.
        order.forget()
    # Every rank is here, so no rank reads keys of a meeting before. A key each, so
    # that no rank has more requests than the others by two.
    ended = _ended[group]
    stale, ended[:] = ended[:-1], ended[-1:]
    if (key := {0: "here", 1: "sum"}.get(group.rank())) is not None:
        store = agreement.key_value_store()
        for prefix in stale:
            store.delete_key(f"{prefix}/{key}")


class _Line(NamedTuple):
    """What a rank writes at a meeting."""

    rank: int
    does: str
    place: list[str]
    digest: int  # of all that is compared: the facts themselves may be long
    gave_up: bool


class _Meeting:
    """The keys of one meeting, and what this rank knows of them."""

    __slots__ = (
        *("_announced", "_group", "_line", "_one", "_shift", "_sum", "_way_out"),
        *("name", "prefix"),
    )

    def __init__(
        self, group: dist.ProcessGroup, announced: Announcement, history: list[Any]
    ) -> None:
        self._group, self._way_out = group, announced.way_out
        self.name = agreement.agreed_name(group).name
        self.prefix = f"composable_fsdp/meeting/{self.name}/{_numbers[self.name] + 1}"
        does, place = announced.does, list(announced.place)
        digest = tag_of((place, announced.facts or does))
        self._line = _Line(dist.get_rank(), does, place, digest, gave_up=False)
        # The low bits of the sum count the ranks; the sum of all digests must fit into
        # the other bits of the store's integers, which have 63 and a sign.
        self._shift = group.size().bit_length()
        whole = tag_of((digest, history))
        self._one = 1 + (whole % (1 << (62 - 2 * self._shift)) << self._shift)
        self._sum, self._announced = 0, False

    def arrive(self) -> None:
        """Announce this rank. Two round trips."""
        # The line comes first: every rank in the sum has a line.
        self._write(gave_up=False)
        # Before the sum: after a signal between the two, this rank must not be counted.
        self._announced = True
        self._add(self._one)

    def look(self) -> None:
        """Read which ranks are here. One round trip."""
        # Not ``add``: a FileStore grows by each.
        self._sum = int(agreement.key_value_store().get(f"{self.prefix}/sum"))

    def gives_up(self) -> bool:
        """Take the announcement back, unless all ranks have come at this moment."""
        # The line first, as in ``arrive``: a rank that reads the lines may miss this
        # rank a moment too early, and never counts a rank that has left.
        self._write(gave_up=True)
        # Only once: an exception may follow the error of a rank that has given up.
        if self._announced:
            self._announced = False
            self._add(-self._one)
            if self._count() == self._group.size() - 1:
                # The last rank has come in between and relies on this rank.
                self.arrive()
                return False
        return True

    def end(self) -> None:
        """Count the meeting: the next one has other keys."""
        _numbers[self.name] += 1
        _ended.setdefault(self._group, []).append(self.prefix)

    def is_awaited(self) -> bool:
        """Return whether ranks are missing, as far as this rank knows."""
        return self._count() < self._group.size()

    def is_equal(self) -> bool:
        """Return whether the ranks that are here have equal calls and histories."""
        return self._sum == self._count() * self._one

    def difference(self) -> DesyncError | None:
        """Return the error if ranks have announced different calls."""
        if self.is_equal():
            return None
        here = self._present()
        # If all do the same, only their histories differ.
        if len({each.digest for each in here.values()}) < 2:
            return None
        told = {rank: each.does for rank, each in here.items()}
        places = {rank: tuple(each.place) for rank, each in here.items()}
        return DesyncError(disagreement(told, places, self._way_out))

    def missing(self) -> list[int]:
        """Return the global ranks that have not come, as the store says now."""
        self.look()
        if not self.is_awaited():
            return []
        here = {dist.get_rank(), *self._present()}
        everyone = dist.get_process_group_ranks(self._group)
        return [rank for rank in everyone if rank not in here]

    def _present(self) -> dict[int, _Line]:
        """Return the lines of the ranks that are here, by global rank."""
        text = bytes(agreement.key_value_store().get(f"{self.prefix}/here")).decode()
        # In the order of the lines: a rank may give up and come again.
        lines = (_Line(*json.loads(each)) for each in text.splitlines())
        latest = {line.rank: line for line in lines}
        return {rank: line for rank, line in latest.items() if not line.gave_up}

    def _write(self, *, gave_up: bool) -> None:
        """Append a line about this rank."""
        line = json.dumps(self._line._replace(gave_up=gave_up))
        agreement.key_value_store().append(f"{self.prefix}/here", f"{line}\n")

    def _add(self, number: int) -> None:
        """Add to the sum, and read it."""
        self._sum = int(agreement.key_value_store().add(f"{self.prefix}/sum", number))

    def _count(self) -> int:
        """Return the number of ranks in the sum."""
        return self._sum & ((1 << self._shift) - 1)
