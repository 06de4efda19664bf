"""Walking inputs and outputs of any shape, fast for a tensor or a tuple of them.

Containers that pytree knows are walked by it; dataclasses that it does not know are
walked by their fields. A tensor that is missed would be an error in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (int, float, bool, str, bytes, type(None))


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in ``value``, left to right, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, _PLAIN):
        return []
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                found.extend(tensors_in(getattr(leaf, field.name)))
    return found


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
    if is_dataclass(leaf) and not isinstance(leaf, type):
        old = {f.name: getattr(leaf, f.name) for f in fields(leaf) if f.init}
        new = {name: map_tensors(item, change) for name, item in old.items()}
        if any(new[name] is not old[name] for name in old):
            return replace(leaf, **new)
    return leaf
