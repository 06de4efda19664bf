"""Walking inputs and outputs of any shape, fast for a tensor or a tuple of them.

Containers that pytree knows are walked by it; others as what they are (dataclass,
mapping, list), outputs at last by their attributes. A tensor that is missed would be an
error in backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Set
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_PLAIN = (int, float, bool, str, bytes, type(None))


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in ``value``, left to right, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, _PLAIN):
        return []
    found: list[Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: object, found: list[Tensor], seen: set[int]) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
            seen.add(id(leaf))
            for inner in _inside(leaf):
                _collect(inner, found, seen)


def _inside(leaf: object) -> Iterable[object]:
    """What an object that pytree does not know holds; not what it could compute."""
    if isinstance(leaf, (type, nn.Module)) or callable(leaf):
        return ()
    if isinstance(leaf, Mapping):
        return leaf.values()
    if isinstance(leaf, (list, tuple, Set)):
        return leaf
    slots = [s for kind in type(leaf).__mro__ for s in getattr(kind, "__slots__", ())]
    held = [getattr(leaf, slot) for slot in slots if hasattr(leaf, slot)]
    return [*held, *getattr(leaf, "__dict__", {}).values()]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with every tensor replaced by ``change(tensor)``.

    Containers without a tensor that changes are returned as they are, so that their
    identity is kept where nothing is to be done.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    leaves, spec = pytree.tree_flatten(value)
    changed = [_map_leaf(leaf, change) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(changed, spec)


def to_device(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with their tensors on ``device``; ``None`` if they are."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    moved = map_tensors((args, kwargs), move)
    return None if moved[0] is args and moved[1] is kwargs else moved


def _map_leaf(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    made: Any = None
    if is_dataclass(leaf) and not isinstance(leaf, type):
        old = {f.name: getattr(leaf, f.name) for f in fields(leaf) if f.init}
        new = {name: map_tensors(item, change) for name, item in old.items()}
        if any(new[name] is not old[name] for name in old):
            return replace(leaf, **new)
    elif isinstance(leaf, (MutableMapping, list)):
        # Of a class that pytree does not know.
        items = leaf.items() if isinstance(leaf, MutableMapping) else enumerate(leaf)
        for key, old_item in list(items):
            new_item = map_tensors(old_item, change)
            if new_item is not old_item:
                made = copy.copy(leaf) if made is None else made
                made[key] = new_item
    return leaf if made is None else made
