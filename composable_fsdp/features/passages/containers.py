"""Tensors inside of arguments and outputs, at any depth.

A forward gets a copy of a list in which a tensor is replaced, because recomputation
must find the first tensor in the caller's. Changes of the copy are applied afterwards.
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
from typing import Any

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
    """Return the items of a mutable container; None if ``value`` is none."""
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


class Given:
    """The arguments that a forward gets, and what the caller gave in their place."""

    __slots__ = ("casts", "copies", "held", "originals", "since")

    def __init__(self) -> None:
        self.copies: list[tuple[Any, Any, dict[Any, Any]]] = []
        """A container of the caller, its copy, and the items of the copy at first."""
        self.originals: dict[int, tuple[Any, Any]] = {}
        """By id of what the forward gets: that object, and the caller's."""
        self.casts: list[tuple[Tensor, Tensor, int]] = []
        """A tensor of the caller, its cast copy, and the copy's version at first."""
        self.held: object = None
        """The arguments, if the forward can put a tensor into one of them."""
        self.since = -1
        """Sequence number of the next autograd node when the forward began."""

    def replace(self, arguments: Arguments, change: Change) -> Arguments:
        """Return the arguments with other tensors; containers of these are copies."""
        seen: dict[int, Any] = {}
        args = tuple([_replaced(v, change, self, seen) for v in arguments[0]])
        kwargs = {k: _replaced(v, change, self, seen) for k, v in arguments[1].items()}
        return args, kwargs

    def write_casts_back(self) -> None:
        """Copy in-place writes of the forward to cast inputs into the originals."""
        for original, made, version in self.casts:
            # Plain torch refuses in-place writes to a leaf that requires grad, so there
            # is no plain model whose caller sees such a write.
            if made._version != version and not (
                original.requires_grad and original.is_leaf and torch.is_grad_enabled()
            ):
                original.copy_(made)

    def give_back(self, output: Any = None) -> Any:
        """Apply changes of the copies; return the output with the caller's objects."""
        # A copy of a copy (cast, then aliased) was appended after the first copy.
        for each in reversed(self.copies):
            self._apply(*each)
        copies = {id(copied) for _, copied, _ in self.copies}
        output = self._restored(output, copies) if copies else output
        self.copies.clear()
        self.originals.clear()
        return output

    def _own(self, item: Any) -> Any:
        """Return the caller's object for ``item``, or ``item``."""
        # Several steps: a tensor may have been cast, and then aliased.
        while id(item) in self.originals:
            item = self.originals[id(item)][1]
        return item

    def _apply(self, original: Any, made: Any, before: dict[Any, Any]) -> None:
        """Apply the changes of a copy to the original container."""
        now = _items_of(made) or {}
        if isinstance(original, MutableSequence):
            items, earlier = list(now.values()), list(before.values())
            # If the forward only appended, extend the original; else replace all.
            kept = len(items) >= len(earlier) and all(map(is_, items, earlier))
            if not kept:
                original.clear()
            original.extend(map(self._own, items[len(earlier) :] if kept else items))
            return
        # Mappings and objects: only what was removed, added or replaced changes.
        for key in before.keys() - now.keys():
            if isinstance(original, MutableMapping):
                original.pop(key, None)
            elif hasattr(original, key):
                object.__delattr__(original, key)
        for key, item in now.items():
            if key not in before or before[key] is not item:
                _set_item(original, key, self._own(item))

    def _restored(self, value: Any, copies: set[int]) -> Any:
        """Return ``value`` with the caller's containers in place of copies."""
        if id(value) in copies:
            return self._own(value)
        if isinstance(value, (list, dict)):
            for key, item in (_items_of(value) or {}).items():
                new = self._restored(item, copies)
                if new is not item:
                    value[key] = new
        elif isinstance(value, tuple):
            return _with_items(value, [self._restored(i, copies) for i in value])
        return value


def map_tensors(value: Any, change: Change) -> Any:
    """Return ``value`` with other tensors; containers without a change stay."""
    return _replaced(value, change, None, {})


def _replaced(
    value: Any, change: Change, given: Given | None, seen: dict[int, Any]
) -> Any:
    """Return ``value`` with other tensors; ``seen`` has containers by id, as made."""
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
            return seen[id(value)]
        else:
            seen[id(value)] = value  # a container inside itself
            made = _replace_items(value, items, change, given, seen)
            seen[id(value)] = made
    if given is not None and made is not value:
        given.originals[id(made)] = made, value  # with it, so that the id stays its own
    return made


def _replace_items(
    value: Any,
    items: dict[Any, Any],
    change: Change,
    given: Given | None,
    seen: dict[int, Any],
) -> Any:
    """Return the container, or a copy with other tensors."""
    new = {key: _replaced(item, change, given, seen) for key, item in items.items()}
    if all(map(is_, new.values(), items.values())):
        # A type that only pytree knows may hold tensors outside the attributes.
        known = isinstance(value, (MutableMapping, MutableSequence))
        plain = known or is_dataclass(value)
        return value if plain else _map_node(value, change, given, seen)
    # A shallow copy keeps the type and all other attributes of the container.
    made = copy.copy(value)
    for key, item in new.items():
        if item is not items[key]:
            _set_item(made, key, item)
    if given is not None:
        given.copies.append((value, made, new))
    return made


def _map_node(
    value: Any, change: Change, given: Given | None, seen: dict[int, Any]
) -> Any:
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
