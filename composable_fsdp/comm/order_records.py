"""What an order log remembers; a steady step does not come here."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_MODES = 64
"""Number of modes whose records are kept, of successors, and of places in a
``CallOrder``. The oldest goes first."""

_STEADY = 4
"""Number of equal rounds after which a mode whose order varied is recorded again."""


class Record:
    """The order of a mode."""

    __slots__ = ("departures", "equal", "since", "uses")

    def __init__(self) -> None:
        self.uses: list[object] | None = None
        """The recorded uses, then ``None``; None before the first round has ended."""
        self.since = 0
        """The round in which the record was made."""
        self.departures = 0
        """Number of departures, on all ranks alike. From 2 on the order varies."""
        self.equal = 0
        """Number of equal rounds in a row, while the order varies."""

    def count_departure(self) -> None:
        """Count a departure from the recorded uses."""
        self.departures += 1

    def update(self, uses: list[object], number: int, *, varies: bool) -> None:
        """Make the uses of a round the recorded uses."""
        if varies:
            self.equal = self.equal + 1 if uses == self.uses else 0
            if self.equal >= _STEADY:
                self.departures = self.equal = 0
        self.uses, self.since = uses, number


def keep(table: dict[K, V], key: K, value: V, *, most: int = MOST_MODES) -> None:
    """Make an entry the newest of a table, and remove the oldest entry if needed."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]
