"""Containers that a unit was given copies of, and what it did to the copies.

A tensor in a list that needs a gradient, is on another device or is to be cast is
replaced by another, and so the list is copied: the caller's keeps the caller's tensors.
What a unit appends to such a list, or sets in a dict, in an attribute of a dataclass or
in a cache, is meant for the caller. So the copy is compared, once forward is over, with
what it was at first, and what has changed is done to the caller's container::

    given    [h]        the caller's           caller's afterwards  [h, aux]
    before   [h']       the copy at first
    copy     [h', aux]  after forward          h' stands for h wherever it is now
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from dataclasses import is_dataclass
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from composable_fsdp.flat.handle import FlatParamHandle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ContainerCopy(NamedTuple):
    """One container and its copy, with the items of both as forward began."""

    original: Any
    copy: Any
    given: dict[Any, Any]
    before: dict[Any, Any]


class ContainerCopies(NamedTuple):
    """The copies that one forward of a unit works on."""

    depth: int
    """Number of forwards of the unit that are running, this one included."""
    copies: list[ContainerCopy]
    aliases: dict[int, Tensor]
    """Tensor arguments by the identity of their aliases."""


def items_of(value: Any) -> dict[Any, Any] | None:
    """The items of a container that can be written to, by key, index or attribute.

    ``None`` if it is none. Of objects, dataclasses and those that pytree knows.
    """
    if isinstance(value, MutableSequence):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if isinstance(value, (type, tuple, frozenset, nn.Module)):
        return None
    if is_dataclass(value) or type(value) in pytree.SUPPORTED_NODES:
        return _attributes(value)
    return None


def _attributes(value: Any) -> dict[str, Any]:
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


def set_item(container: Any, key: Any, item: Any) -> None:
    """Set the item that ``items_of`` gives under ``key``."""
    if isinstance(container, (MutableSequence, MutableMapping)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also of a frozen one


def record_copies(
    handle: FlatParamHandle,
    copies: list[ContainerCopy],
    old: Arguments,
    new: Arguments | None,
) -> Arguments:
    """Note that a forward of the unit works on ``copies``; returns ``new``.

    Its arguments are ``new``, of which some are aliases of those in ``old``.
    """
    assert new is not None
    pairs = [
        *zip(old[0], new[0], strict=True),
        *[(value, new[1][key]) for key, value in old[1].items()],
    ]
    aliases = {
        id(alias): tensor
        for tensor, alias in pairs
        if tensor is not alias and isinstance(tensor, Tensor)
    }
    handle.lent.append(ContainerCopies(len(handle.calls), copies, aliases))
    return new


def apply_changes(lent: ContainerCopies, output: Any) -> Any:
    """Do to the caller's containers what forward did to its copies.

    Items that it left alone stay the caller's own. Returns ``output`` with the caller's
    containers in the places of copies.
    """
    originals = {id(each.copy): each.original for each in lent.copies}
    own: dict[int, Any] = {**lent.aliases, **originals}
    for each in lent.copies:
        for key, item in each.before.items():
            if item is not each.given[key]:
                own[id(item)] = each.given[key]
    # A copy of a copy (cast, then aliased) comes later than what it was made of.
    for each in reversed(lent.copies):
        _apply_change(each, own)
    return _restored(output, originals)


def _own(item: Any, own: dict[int, Any]) -> Any:
    while id(item) in own:
        item = own[id(item)]
    return item


def _apply_change(copied: ContainerCopy, own: dict[int, Any]) -> None:
    original, made, _, before = copied
    now = items_of(made)
    assert now is not None
    if isinstance(original, MutableSequence):
        items, earlier = list(now.values()), list(before.values())
        kept = len(items) >= len(earlier) and all(map(is_, items, earlier))
        if not kept:
            original.clear()
        new = items[len(earlier) :] if kept else items
        original.extend([_own(item, own) for item in new])
        return
    for key in before:
        if key not in now:
            _delete(original, key)
    for key, item in now.items():
        if key not in before or before[key] is not item:
            set_item(original, key, _own(item, own))


def _delete(container: Any, key: Any) -> None:
    if isinstance(container, MutableMapping):
        container.pop(key, None)
    elif hasattr(container, key):
        object.__delattr__(container, key)


def _restored(value: Any, originals: dict[int, Any]) -> Any:
    """``value`` with originals in the places of their copies, at any depth."""
    if id(value) in originals:
        return _own(value, originals)
    if isinstance(value, (list, dict)):
        for key, item in list((items_of(value) or {}).items()):
            new = _restored(item, originals)
            if new is not item:
                value[key] = new
        return value
    if isinstance(value, tuple):
        items = [_restored(item, originals) for item in value]
        if all(map(is_, items, value)):
            return value
        make: Any = getattr(value, "_make", tuple)
        return make(items)
    return value
