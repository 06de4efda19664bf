"""``CallOrder``: which calls over a process group follow which."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_EVENTS = 64
"""Number of places that a ``CallOrder`` keeps. The oldest goes first."""
START = (None, 0, None)
"""The place in a ``CallOrder`` before the first event."""


class CallOrder:
    """The calls over a group, and the calls that followed equal events before.

    The events are the forward rounds of the order logs, by number of the log, and the
    calls that meet (``meetings``).
    """

    __slots__ = ("following", "place")

    def __init__(self) -> None:
        self.following: dict[Hashable, Hashable] = {}
        """By ``place``: the event that followed last time."""
        self.place: tuple[Hashable, int, Hashable] = START
        """The last event, how often it came in a row, and the other event before."""

    def expected(self) -> Hashable:
        """Return the call that is expected next; None if no call is."""
        event = self.following.get(self.place)
        return None if type(event) is int else event

    def note(self, event: Hashable) -> None:
        """Append ``event``, which all ranks share, to the history."""
        # The number of equal events in a row is a part of the place, so a loop that
        # clips after every fourth forward is expected to do so. The other event before
        # tells loops apart that share an event.
        place = last, count, before = self.place
        following = self.following
        # Only a changed entry is written again, and becomes the newest: a steady step
        # changes no table.
        if following.get(place) != event:
            keep(following, place, event)
        self.place = (event, count + 1, before) if event == last else (event, 1, last)

    def forget(self) -> None:
        """Forget all events."""
        self.following.clear()
        self.place = START


def keep(table: dict[K, V], key: K, value: V, *, most: int = MOST_EVENTS) -> None:
    """Make an entry the newest of a table, and remove the oldest entry if needed."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]
