"""The order of uses that a unit's collectives are held against.

In a steady step the core compares a use with the expected one inline, and calls
nothing. ``features.guard`` has the implementation.

Parameters frozen and settings changed since ``fully_shard`` are part of the mode of a
round.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol


class UseOrder(Protocol):
    """The order of uses in forward or in backward."""

    expected: Sequence[object]
    """The recorded uses of this round, then ``None``."""
    position: int
    """Index of the next use in ``expected``."""
    number: int
    """Of the order among those over its group, equal on all ranks."""

    @property
    def is_open(self) -> bool:
        """Whether a round is in progress."""

    def depart(self, use: object, mode: Hashable) -> None:
        """Record a use that is not the expected one, before its collective.

        Raises: DesyncError, if another rank does something else.
        """

    def end(self) -> None:
        """End the round, if one is in progress. Raises: DesyncError, as ``depart``."""

    def drop(self) -> None:
        """Abandon the round in progress, if any."""


class UnitLogs(NamedTuple):
    """The order logs of a unit; ``None`` if the unit sends no such collective."""

    forward: UseOrder | None = None
    """Order of the unit's all-gathers in forward."""
    backward: UseOrder | None = None
    """Order of the unit's all-gathers in backward."""
    reduce: UseOrder | None = None
    """Order of the unit's reductions."""


NO_LOGS = UnitLogs()
