"""What the ranks of a group begin, one after another, and what they begin next.

Programs repeat themselves, so the history of a group is expected to go on as it went on
from an earlier place. Ranks have equal histories: each knows what the others expect, a
rank that begins what is expected sends nothing, and another rank asks for a meeting ::

    history    F B F B clip  F B F B
    expected                         clip, since the last four went on so before
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable_fsdp.comm.meeting import Call

MOST_EVENTS = 4096
"""Number of events that an ``Order`` keeps."""
_LONGEST = 32
"""Number of events by which earlier places are told apart."""


class Order:
    """The events over some groups: rounds (log number, mode), and calls that meet."""

    __slots__ = ("at", "events", "logs", "raised")

    def __init__(self, first: Order | None = None) -> None:
        # Shared with the ``first`` order that has the same first group.
        self.logs: list[str] = [] if first is None else first.logs
        """The names of all order logs over the first group, by number of the log."""
        self.raised: dict[int, tuple[int, int]] = {} if first is None else first.raised
        """By number of the log: the round that was abandoned, and the number of its
        uses, if other ranks may wait in collectives that this rank has left out."""
        self.events: list[Hashable] = []
        self.at = 0  # index of the event that is expected next; 0 for none

    def expected(self) -> Hashable:
        """Return the event that is expected next; None without experience."""
        return self.events[self.at] if self.at else None

    def note(self, event: Hashable) -> None:
        """Append ``event``, which all ranks share."""
        events, at = self.events, self.at
        if at and events[at] == event:
            # The object from before: modes name all units, and thousands are kept.
            events.append(events[at])
            self.at += 1
        else:
            with suppress(ValueError):
                event = events[events.index(event)]
            events.append(event)
            self.at = self._repeated()
        if len(events) > MOST_EVENTS:
            del events[: MOST_EVENTS // 2]
            # The place that was found may be further back than ``_LONGEST`` tells.
            self.at -= MOST_EVENTS // 2
            if self.at <= 0:
                self.at = self._repeated()

    def _repeated(self) -> int:
        """Return the index behind the earliest place that is most like the end."""
        events, found, longest = self.events, 0, 0
        for at in range(1, len(events)):
            length, most = 0, min(at, _LONGEST)
            # Equal events are one object.
            while length < most and events[at - 1 - length] is events[-1 - length]:
                length += 1
            if length > longest:
                found, longest = at, length
            if longest == _LONGEST:
                break
        return found

    def forget(self) -> None:
        """Forget all events."""
        self.events.clear()
        self.at = 0

    def told(self) -> list[object]:
        """Return the history in the form in which ranks compare it."""
        numbers: dict[int, int] = {}
        text = [numbers.setdefault(id(e), len(numbers)) for e in self.events]
        distinct = {id(e): e for e in self.events}.values()
        shown = (e.story if isinstance(e, Call) else e[0] for e in distinct)  # type: ignore[index]  # rounds are tuples
        return [self.at, text, *shown]


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
        first = next(iter(found.values()), None)
        found[key] = Order(first)
    return found[key]
