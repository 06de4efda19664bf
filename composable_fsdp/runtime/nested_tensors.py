"""Traversal of nested inputs and outputs, fast for a tensor or a tuple of tensors.

Containers that pytree knows are traversed by pytree; other containers as dataclass,
mapping or list; other objects in outputs by attributes. A tensor that is missed would
cause an error in backward.
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

from composable_fsdp.runtime.container_copies import (
    ContainerCopy,
    Copies,
    items_of,
    set_item,
    with_items,
)

_PLAIN = (int, float, bool, str, bytes, type(None))
_PLAIN_TYPES: frozenset[type] = frozenset(_PLAIN)


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
    """Return the items or attributes of an object that pytree does not know.

    Properties are not called. Items of a function are the tensors that the function
    captured. Modules, types and other callables have no items.
    """
    if isinstance(leaf, FunctionType):
        return _captured(leaf)
    if isinstance(leaf, (type, nn.Module)) or callable(leaf):
        return ()
    if isinstance(leaf, Mapping):
        return leaf.values()
    if isinstance(leaf, (list, tuple, Set)):
        return leaf
    # Read only stored attributes: a property may compute or raise.
    slots = [s for kind in type(leaf).__mro__ for s in getattr(kind, "__slots__", ())]
    held = [getattr(leaf, slot) for slot in slots if hasattr(leaf, slot)]
    return [*held, *getattr(leaf, "__dict__", {}).values()]


def _captured(function: FunctionType) -> Iterable[Tensor]:
    """Yield the tensors of enclosing functions that ``function`` reads."""
    # Tensors alone: other variables may lead to everything that a program holds.
    for cell in function.__closure__ or ():
        # A cell is empty until the variable is assigned.
        with suppress(ValueError):
            if isinstance(cell.cell_contents, Tensor):
                yield cell.cell_contents


def map_tensors(
    value: Any,
    change: Callable[[Tensor], Tensor],
    copies: Copies | None = None,
) -> Any:
    """Return ``value`` with every tensor replaced by ``change(tensor)``.

    Returns: ``value`` itself if no tensor changes, else a copy. Containers inside, in
        which no tensor changes, stay the same objects.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    # A container that occurs several times is copied only once.
    if copies and (known := _copy_of(value, copies)) is not None:
        return known
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make")):
        return with_items(value, [map_tensors(i, change, copies) for i in value])
    given = items_of(value)
    if given is None:
        return _map_node(value, change, copies)
    before = {key: map_tensors(i, change, copies) for key, i in given.items()}
    # Return the same object if no tensor changed, so that the identity of the container
    # is kept.
    if all(map(is_, before.values(), given.values())):
        # A type that only pytree knows may hold tensors outside the attributes.
        return value if _is_plain(value) else _map_node(value, change, copies)
    # A shallow copy keeps the type and all other attributes of the container.
    made = copy.copy(value)
    for key, item in before.items():
        if item is not given[key]:
            set_item(made, key, item)
    if copies is not None:
        copies.append(ContainerCopy(value, made, given, before))
    return made


def _copy_of(value: Any, copies: Copies) -> Any:
    """Return the copy of a container that was copied before; None if there is none."""
    return next((each.copy for each in copies if each.original is value), None)


def _is_plain(value: object) -> bool:
    """Return whether ``items_of`` sees all items of the container."""
    return isinstance(value, (MutableMapping, MutableSequence)) or is_dataclass(value)


def _map_node(
    value: Any, change: Callable[[Tensor], Tensor], copies: Copies | None
) -> Any:
    """Apply ``map_tensors`` to a container of pytree; return any other object as is."""
    # ``is_leaf`` stops the traversal below the first level; ``map_tensors`` goes on
    # from there.
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if spec.is_leaf():
        return value
    changed = [map_tensors(part, change, copies) for part in parts]
    if all(map(is_, changed, parts)):
        return value
    return pytree.tree_unflatten(changed, spec)


def to_device(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    copies: Copies | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Move the tensors of the arguments to ``device``.

    Returns: the new arguments, or None if all tensors are on ``device`` already.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    moved = tuple([map_tensors(value, move, copies) for value in args])
    named = {key: map_tensors(value, move, copies) for key, value in kwargs.items()}
    # None tells the hook to pass the caller's own arguments.
    if all(map(is_, moved, args)) and all(map(is_, named.values(), kwargs.values())):
        return None
    return moved, named
