"""The moments at which the core calls functions of the layers above it.

``features.defaults`` fills the lists, once for each process.
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
"""Takes a target's forms of parameters: returns the plain target, and the forms."""
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
"""The passages ``first``, ``moving`` and ``full``, and what makes ``searches``."""

NAME_NONFINITE: list[Callable[[Any], str]] = []
"""Returns in words which gradients make a norm NaN or inf, of the norm."""
ORDERS: dict[bool, Callable[[Hashable], Any]] = {}
"""Makes the order of a forward from its mode; by whether it reduces all parameters."""

CHANGED: WeakSet[Any] = WeakSet()
"""Contexts with a setting that was changed since the last forward began."""


# Set by ``features.defaults``.
changes: Any
"""What takes up changes between steps (``features.changes.adopt``)."""
copy_state: Callable[[Any, dict[int, Any]], Any]
"""Returns the state of a copied unit, for ``copy.deepcopy``: the state, the memo."""
reduce_by_hook: Callable[[Any], None]
"""Has the communication hook of the user reduce every region of a handle."""
