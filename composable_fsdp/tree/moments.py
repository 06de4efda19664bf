"""The moments at which the core calls functions of the layers above it.

``features.defaults`` fills the lists, once for each process. So the path from
``fully_shard`` to a step imports none of the layers that it calls::

    fully_shard          UNITS_PLANNED     BEFORE_SYNC     FORMS_TAKEN
                         UNIT_BUILT        MODULES_SHARDED
    first forwards       TREE_FOUND        TREE_INITIALIZED
                         RANKS_MEET        FIRST_FORWARD
    a later forward      NEXT_FORWARD      CHANGED_FLAGS
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

# States and contexts are Any here, because their own module imports this one.
BEFORE_SYNC: list[Callable[[str, nn.Module, Any], None]] = []
"""Before a broadcast of values: the name of the API, the module, and the ranks."""
UNITS_PLANNED: list[Callable[[Any, Any], None]] = []
"""Before any change: the targets and the ranks, to refuse."""
FORMS_TAKEN: list[Callable[[Any], tuple[Any, Any]]] = []
"""Of a target with parameters that are not plain: puts plain ones in their places and
returns the target, and the forms by slot index."""
UNIT_BUILT: list[Callable[[Any, Iterable[nn.Module]], None]] = []
"""After each unit was built: its state, and all modules of the unit."""
MODULES_SHARDED: list[Callable[[], None]] = []
"""After every application."""
TREE_FOUND: list[Callable[[Any, Any], None]] = []
"""Before a tree is initialized: the handle of its root, and names with handles."""
TREE_INITIALIZED: list[Callable[[Any], None]] = []
"""At the end of the lazy initialization of a tree: the context."""
RANKS_MEET: list[Callable[[Any, Any], None]] = []
"""In each forward until the ranks of a tree were compared: the context and the root."""
FIRST_FORWARD: list[Callable[[Any], None]] = []
"""In the first forward of a tree, once its ranks were compared: the context."""
NEXT_FORWARD: list[Callable[[Any], None]] = []
"""In each forward while the list holds the function: the context."""
CHANGED_FLAGS: list[Callable[[Iterable[Any]], Iterable[Any]]] = []
"""More of ``RuntimeContext.changed_flags``, of the states of a tree in ``CHANGED``."""

CHANGED: WeakSet[Any] = WeakSet()
"""Contexts with a setting that was changed since the last forward began."""
RECORDS: WeakKeyDictionary[Any, Callable[[Hashable, bool], Any]] = WeakKeyDictionary()
"""By context: makes the record of a forward from its mode, and from whether parameters
without a gradient are reduced; for trees that need other records than the default."""


class Observer(Protocol):
    """Watches the outermost forwards of a tree, as ``RuntimeContext.observers``."""

    def iteration_begins(self) -> None:
        """Called when a forward begins."""

    def iteration_ends(self) -> None:
        """Called when a forward has ended or raised."""
