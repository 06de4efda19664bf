"""The order in which units are used in a forward.

Each use is an entry, so a unit that runs twice has two entries. Backward walks the
record from the end, independently of the shape of the module tree.
"""

from __future__ import annotations

from typing import Generic, TypeVar

H = TypeVar("H")


class ExecutionOrder(Generic[H]):
    """Uses of units in a forward of the root, first to last.

    >>> order = ExecutionOrder[str]()
    >>> [order.record(unit) for unit in ("embed", "block", "block")]
    [0, 1, 2]
    >>> order.before(1)
    'embed'
    """

    __slots__ = ("uses",)

    def __init__(self) -> None:
        # Backward refers to a use by the index in this list.
        self.uses: list[H] = []

    def record(self, unit: H) -> int:
        """Append a use and return its index."""
        self.uses.append(unit)
        return len(self.uses) - 1

    def before(self, index: int) -> H | None:
        """Return the nearest earlier use of another unit; ``None`` if there is none."""
        # Consecutive uses of the same unit are skipped: a prefetch of the current unit
        # would have no effect.
        unit = self.uses[index]
        for i in range(index - 1, -1, -1):
            if self.uses[i] is not unit:
                return self.uses[i]
        return None
