"""The order in which units were used in one forward; a pure record.

Each use is one entry, so a unit that runs twice stands there twice, and index 0 is an
index like any other. Backward walks the record from its end, whatever the shape of the
tree.
"""

from __future__ import annotations

from typing import Generic, TypeVar

H = TypeVar("H")


class ExecutionOrder(Generic[H]):
    """Uses of units, first to last, of the forward of one root call.

    >>> order = ExecutionOrder[str]()
    >>> [order.record(unit) for unit in ("embed", "block", "block")]
    [0, 1, 2]
    >>> order.before(1)
    'embed'
    """

    __slots__ = ("uses",)

    def __init__(self) -> None:
        self.uses: list[H] = []

    def record(self, unit: H) -> int:
        """Add a use and return its index."""
        self.uses.append(unit)
        return len(self.uses) - 1

    def before(self, index: int) -> H | None:
        """The nearest earlier use of another unit; ``None`` if there is none."""
        unit = self.uses[index]
        for i in range(index - 1, -1, -1):
            if self.uses[i] is not unit:
                return self.uses[i]
        return None
