"""Functions that upper layers want called whenever modules were sharded.

``entries.apply`` shards modules, and ``optim`` watches the optimizers that step on the
sharded parameters. ``entries`` calls this registry instead of ``optim``, so the path
from ``fully_shard`` to a unit's buffers does not import the code for optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable

_callbacks: list[Callable[[], None]] = []


def call_after_sharding(callback: Callable[[], None]) -> None:
    """Have ``callback`` called after every application; called once per import."""
    _callbacks.append(callback)


def modules_were_sharded() -> None:
    """Call the callbacks in the order of registration. Collective: none."""
    for callback in _callbacks:
        callback()
