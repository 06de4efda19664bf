"""The moments at which the core calls functions of the layers above it.

``features.defaults`` fills the lists, once for each process. So the path from
``fully_shard`` to a step imports none of the layers that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any
from weakref import WeakSet

from torch import nn

# States and contexts are Any here, because their own module imports this one.
BEFORE_SYNC: list[Callable[[str, nn.Module, Any, dict[str, str]], None]] = []
"""Before a broadcast of values: API, module, ranks, and dtypes and shapes by name."""
UNITS_PLANNED: list[Callable[[Any, Any, Any], None]] = []
"""Before a change, if any is not plain or has an arena: targets, ranks and device."""
FORMS_TAKEN: list[Callable[[Any], tuple[Any, Any]]] = []
"""Of a target with parameters that are not plain: puts plain ones in their places and
returns the target, and the forms by slot index."""
UNIT_BUILT: list[Callable[[Any, Iterable[nn.Module]], None]] = []
"""After each unit was built: its state, and the modules that the state owns."""
MODULES_SHARDED: list[Callable[[], None]] = []
"""After every application."""
TREE_FOUND: list[Callable[[Any, Any], None]] = []
"""Before a tree is initialized: the handle of its root, and names with handles."""
TREE_INITIALIZED: list[Callable[[Any], None]] = []
"""At the end of the lazy initialization of a tree: the context."""
MODELS_MEET: list[Callable[..., None]] = []
"""Before the first gather of a tree: as ``tree.root.compare_models``."""
RANKS_MEET: list[Callable[[Any, Any], None]] = []
"""In each forward until the ranks of a tree were compared: the context and the root."""
FIRST_FORWARD: list[Callable[[Any], None]] = []
"""In the first forward of a tree, once its ranks were compared: the context."""
NEXT_FORWARD: list[Callable[[Any], None]] = []
"""In each forward while the list holds the function: the context."""
HANDED_OUT: list[Callable[[Any], None]] = []
"""Before modules show full parameters to the user: the handle."""
KEEPS_PRECISION: list[Callable[[nn.Module], None]] = []
"""For each module that computes in the dtype of its own parameters: the module."""
PASSAGES: dict[str, Any] = {}
"""``first``, of the first forwards of a unit; ``moving``, of outermost forwards on a
GPU; ``full``, to which others hand on (``runtime.forward.Passage``); and ``searches``,
what the first forwards of a unit find, made from its modules."""

NAME_NONFINITE: list[Callable[[Any], str]] = []
"""Returns in words which gradients make a norm NaN or inf, of the norm."""
ORDERS: dict[bool, Callable[[Hashable], Any]] = {}
"""Makes the order of a forward from its mode; by whether the tree reduces parameters
without a gradient."""

CHANGED: WeakSet[Any] = WeakSet()
"""Contexts with a setting that was changed since the last forward began."""


# Set by ``features.defaults``.
changes: Any
"""What takes up changes that a user made between steps (``features.changes.adopt``):
``adopt``, ``follow_flags`` and ``is_in_shards``."""
copy_state: Callable[[Any, dict[int, Any]], Any]
"""Returns the state of a copied unit, for ``copy.deepcopy``: the state, the memo."""
reduce_by_hook: Callable[[Any], None]
"""Has the communication hook of the user reduce every region of a handle."""
