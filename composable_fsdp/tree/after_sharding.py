"""Functions that upper layers want called whenever modules were sharded.

``entries.apply`` shards modules, and ``optim`` watches the optimizers that step on the
sharded parameters. ``entries`` calls this registry instead of ``optim``, so the path
from ``fully_shard`` to a unit's buffers does not import the code for optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

FIRST_FORWARDS: list[Callable[[Any], None]] = []
"""Called in the first forward of a tree with its context (``features.defaults``)."""


class Observer(Protocol):
    """Watches the outermost forwards of a tree, as ``RuntimeContext.observers``."""

    def iteration_begins(self) -> None:
        """Called when a forward begins."""

    def iteration_ends(self) -> None:
        """Called when a forward has ended or raised."""


_callbacks: list[Callable[[], None]] = []


def call_after_sharding(callback: Callable[[], None]) -> None:
    """Have ``callback`` called after every application; called once per import."""
    _callbacks.append(callback)


def modules_were_sharded() -> None:
    """Call the callbacks in the order of registration."""
    for callback in _callbacks:
        callback()
