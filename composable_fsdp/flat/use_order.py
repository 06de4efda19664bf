"""The order of uses that a unit's collectives are held against.

In a steady step the core compares a use with the expected one inline, and calls
nothing. ``features.guard`` has the implementation.

Parameters frozen and settings changed since ``fully_shard`` are part of the mode of a
round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

UseOrder = Any
"""A ``features.guard.order_log.OrderLog``, of which the core uses ``expected``, the
recorded uses of this round, ``position``, the index of the next, ``is_open``,
``depart``, ``end`` and ``drop``."""


class UnitLogs(NamedTuple):
    """The order logs of a unit; ``None`` if the unit sends no such collective."""

    forward: UseOrder | None = None
    """Order of the unit's all-gathers in forward."""
    backward: UseOrder | None = None
    """Order of the unit's all-gathers in backward."""
    reduce: UseOrder | None = None
    """Order of the unit's reductions."""


NO_LOGS = UnitLogs()
