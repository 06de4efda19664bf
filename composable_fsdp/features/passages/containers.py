"""Tensors inside of arguments and outputs, at any depth.

Containers that pytree knows are traversed by pytree; other containers as dataclass,
mapping or list; other objects in outputs by attributes. A tensor that is missed would
cause an error in backward.

If a tensor in a list of the caller requires grad, is on another device or must be cast,
the forward gets another tensor in its place. The list stays the same object, because
the forward may append to it, or set an item of a cache, to return a value::

    before the forward    [h]
    in the forward        [h']  [h', aux]    h' stands for h
    after the forward     [h, aux]
"""

from __future__ import annotations

import copy
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Set,
)
from contextlib import suppress
from dataclasses import is_dataclass
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from composable_fsdp.runtime.backward import Arguments

_PLAIN = (int, float, bool, str, bytes, type(None))
_PLAIN_TYPES: frozenset[type] = frozenset(_PLAIN)
Change = Callable[[Tensor], Tensor]


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in ``value``, left to right, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, _PLAIN):
        return []
    # A kernel size, or a normalized shape: pytree would take 6 us.
    if isinstance(value, (tuple, list)) and _PLAIN_TYPES.issuperset(map(type, value)):
        return []
    found: list[Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: object, found: list[Tensor], seen: set[int]) -> None:
    """Append the tensors in ``value`` to ``found``; ``seen`` has the visited ids."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
            seen.add(id(leaf))
            for inner in _inside(leaf):
                _collect(inner, found, seen)


def _inside(leaf: object) -> Iterable[object]:
    """Return the items or attributes of an object that pytree does not know."""
    if isinstance(leaf, FunctionType):
        return _captured(leaf)
    if isinstance(leaf, (type, nn.Module)) or callable(leaf):
        return ()
    if isinstance(leaf, Mapping):
        return leaf.values()
    if isinstance(leaf, (list, tuple, Set)):
        return leaf
    return _attributes(leaf).values()


def _captured(function: FunctionType) -> Iterable[Tensor]:
    """Yield the tensors of enclosing functions that ``function`` reads."""
    # Tensors alone: other variables may lead to everything that a program holds.
    for cell in function.__closure__ or ():
        # A cell is empty until the variable is assigned.
        with suppress(ValueError):
            if isinstance(cell.cell_contents, Tensor):
                yield cell.cell_contents


def _attributes(value: Any) -> dict[str, Any]:
    """Return the stored attributes of an object, in slots and in ``__dict__``."""
    # Not properties, which may compute or raise.
    slots: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    found = {
        slot: getattr(value, slot)
        for slot in slots
        if slot not in ("__dict__", "__weakref__") and hasattr(value, slot)
    }
    return {**found, **getattr(value, "__dict__", {})}


def _items_of(value: Any) -> dict[Any, Any] | None:
    """Return the items of a mutable container; None if ``value`` is no such container.

    Objects count if they are dataclasses or known to pytree.
    """
    if isinstance(value, MutableSequence):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value.items())
    # Immutable, or not a container of arguments.
    if isinstance(value, (type, tuple, frozenset, nn.Module)):
        return None
    if is_dataclass(value) or type(value) in pytree.SUPPORTED_NODES:
        return _attributes(value)
    return None


def _set_item(container: Any, key: Any, item: Any) -> None:
    """Set the item that ``_items_of`` returns under ``key``."""
    if isinstance(container, (MutableSequence, MutableMapping)):
        container[key] = item
    else:
        # ``object.__setattr__`` also sets attributes of a frozen dataclass.
        object.__setattr__(container, key, item)


class CastInput(NamedTuple):
    """A tensor of the caller, and the cast copy that the forward gets."""

    original: Tensor
    copy: Tensor
    version: int
    """Version counter of the copy at the start of the forward."""


class Given:
    """The arguments that a forward gets, and what the caller gave in their place."""

    __slots__ = ("_containers", "_originals", "casts", "held", "since")

    def __init__(self) -> None:
        self._containers: list[Any] = []
        """Containers of the caller in which a tensor was replaced."""
        self._originals: dict[int, tuple[Any, Any]] = {}
        """By id of what the forward gets: that object, and the caller's."""
        self.casts: list[CastInput] = []
        self.held: object = None
        """The arguments, if the forward can put a tensor into one of them."""
        self.since = -1
        """Sequence number of the next autograd node when the forward began."""

    def replace(self, arguments: Arguments, change: Change) -> Arguments:
        """Return the arguments with ``change(tensor)`` for each tensor.

        Containers of the caller are changed in place, until ``give_back``.
        """
        seen: set[int] = set()
        args = tuple([_replaced(v, change, self, seen) for v in arguments[0]])
        kwargs = {k: _replaced(v, change, self, seen) for k, v in arguments[1].items()}
        return args, kwargs

    def note(self, given: Any, made: Any) -> None:
        """Note that the forward gets ``made`` in place of ``given``."""
        # With ``made``, so that its id stays its own.
        self._originals[id(made)] = made, given

    def note_container(self, container: Any) -> None:
        """Note that items of a container of the caller were replaced."""
        self._containers.append(container)

    def write_casts_back(self) -> None:
        """Copy in-place writes of the forward to cast inputs into the originals.

        Raises: RuntimeError, as torch for an in-place write to the original.
        """
        for original, made, version in self.casts:
            # Plain torch refuses in-place writes to a leaf that requires grad, so there
            # is no plain model whose caller sees such a write.
            if made._version != version and not (
                original.requires_grad and original.is_leaf and torch.is_grad_enabled()
            ):
                original.copy_(made)

    def give_back(self) -> None:
        """Put the caller's tensors back into the caller's containers."""
        for container in self._containers:
            for key, item in (_items_of(container) or {}).items():
                own = item
                # Several steps: a tensor may have been cast, and then aliased.
                while id(own) in self._originals:
                    own = self._originals[id(own)][1]
                if own is not item:
                    _set_item(container, key, own)
        self._containers.clear()
        self._originals.clear()


def map_tensors(value: Any, change: Change) -> Any:
    """Return ``value`` with ``change(tensor)`` for each tensor.

    Containers in which no tensor changes stay the same objects; others are copied.
    """
    return _replaced(value, change, None, set())


def _replaced(value: Any, change: Change, given: Given | None, seen: set[int]) -> Any:
    """Return ``value`` with other tensors; containers of ``given`` change in place."""
    if isinstance(value, Tensor):
        made: Any = change(value)
    elif isinstance(value, _PLAIN):
        return value
    elif type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
        made = _with_items(value, [_replaced(i, change, given, seen) for i in value])
    else:
        items = _items_of(value)
        if items is None:
            made = _map_node(value, change, given, seen)
        elif id(value) in seen:
            return value
        else:
            seen.add(id(value))
            made = _replace_items(value, items, change, given, seen)
    if given is not None and made is not value:
        given.note(value, made)
    return made


def _replace_items(
    value: Any,
    items: dict[Any, Any],
    change: Change,
    given: Given | None,
    seen: set[int],
) -> Any:
    """Return the container with other tensors: itself, or a copy without ``given``."""
    new = {key: _replaced(item, change, given, seen) for key, item in items.items()}
    if all(map(is_, new.values(), items.values())):
        # A type that only pytree knows may hold tensors outside the attributes.
        known = isinstance(value, (MutableMapping, MutableSequence))
        plain = known or is_dataclass(value)
        return value if plain else _map_node(value, change, given, seen)
    made = value
    if given is None:
        # A shallow copy keeps the type and all other attributes of the container.
        made = copy.copy(value)
    else:
        given.note_container(value)
    for key, item in new.items():
        if item is not items[key]:
            _set_item(made, key, item)
    return made


def _map_node(value: Any, change: Change, given: Given | None, seen: set[int]) -> Any:
    """Replace tensors in a container of pytree; return any other object as is."""
    # ``is_leaf`` stops the traversal below the first level; ``_replaced`` goes on.
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if spec.is_leaf():
        return value
    changed = [_replaced(part, change, given, seen) for part in parts]
    if all(map(is_, changed, parts)):
        return value
    return pytree.tree_unflatten(changed, spec)


def _with_items(value: Any, items: list[Any]) -> Any:
    """Return the tuple with other items; the tuple itself if none is another object."""
    if all(map(is_, items, value)):
        return value
    # A named tuple is rebuilt by ``_make``, which takes the items as a single argument.
    make: Any = getattr(value, "_make", tuple)
    return make(items)
