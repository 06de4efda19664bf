"""Copies of containers that the forward of a unit gets, and changes made to the copies.

If a tensor in a list requires grad, is on another device or must be cast, the unit
replaces the tensor, and therefore copies the list: the list of the caller keeps the
caller's tensors. The forward may append to the list, or set an item of a dict, of a
cache or of a dataclass, to return a value to the caller. After the forward the copy is
therefore compared with its first contents, and changes are applied to the caller's
container::

    given    [h]        the caller's           caller's afterwards  [h, aux]
    before   [h']       the copy at first
    copy     [h', aux]  after forward          h' stands for h wherever it is now

In-place writes of the forward to a cast tensor are copied to the caller's tensor, which
a plain module would have written to.
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from dataclasses import is_dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ContainerCopy(NamedTuple):
    """A container and its copy, with the items of both at the start of the forward."""

    original: Any
    copy: Any
    given: dict[Any, Any]
    before: dict[Any, Any]


class CastInput(NamedTuple):
    """A tensor of the caller, and the cast copy that the forward gets."""

    original: Tensor
    copy: Tensor
    version: int
    """Version counter of the copy at the start of the forward."""


class ContainerCopies(NamedTuple):
    """The copies that a forward of a unit uses."""

    copies: list[ContainerCopy]
    casts: list[CastInput]
    aliases: dict[int, Tensor]
    """Tensor arguments by the identity of their aliases."""


Copies = list[ContainerCopy | CastInput]


def items_of(value: Any) -> dict[Any, Any] | None:
    """Return the items of a mutable container, by key, index or attribute.

    None if ``value`` is no mutable container. Objects count if they are dataclasses or
    known to pytree.
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


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in slots and in ``__dict__``."""
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
    """Set the item that ``items_of`` returns under ``key``."""
    if isinstance(container, (MutableSequence, MutableMapping)):
        container[key] = item
    else:
        # ``object.__setattr__`` also sets attributes of a frozen dataclass.
        object.__setattr__(container, key, item)


def sort_copies(
    copies: Copies, old: Arguments, new: Arguments | None
) -> ContainerCopies:
    """Return the copies of a forward that gets ``new`` arguments, not ``old``."""
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
    return ContainerCopies(
        [each for each in copies if isinstance(each, ContainerCopy)],
        [each for each in copies if isinstance(each, CastInput)],
        aliases,
    )


def write_casts_back(copies: ContainerCopies) -> None:
    """Copy in-place writes of a forward to cast inputs into the originals.

    Raises: RuntimeError, as torch for an in-place write to the original.
    """
    for original, made, version in copies.casts:
        # Plain torch refuses in-place writes to a leaf that requires grad, so there is
        # no plain model whose caller sees such a write.
        if made._version != version and not (
            original.requires_grad and original.is_leaf and torch.is_grad_enabled()
        ):
            original.copy_(made)


def apply_changes(changed: ContainerCopies, output: Any) -> Any:
    """Apply changes of the copies to the caller's containers.

    Items that the forward did not change stay the caller's. Returns ``output`` with the
    caller's containers in place of copies.
    """
    originals = {id(each.copy): each.original for each in changed.copies}
    # Map each replaced object to the object of the caller.
    own: dict[int, Any] = {**changed.aliases, **originals}
    for each in changed.copies:
        for key, item in each.before.items():
            if item is not each.given[key]:
                own[id(item)] = each.given[key]
    # A copy of a copy (cast, then aliased) was appended after the first copy.
    for each in reversed(changed.copies):
        _apply_change(each, own)
    return _restored(output, originals)


def _own(item: Any, own: dict[int, Any]) -> Any:
    """Return the caller's object for ``item``, or ``item``."""
    # Several steps, because a copy may have been copied again.
    while id(item) in own:
        item = own[id(item)]
    return item


def _apply_change(copied: ContainerCopy, own: dict[int, Any]) -> None:
    """Apply the changes of a copy to the original container."""
    original, made, _, before = copied
    now = items_of(made)
    assert now is not None
    if isinstance(original, MutableSequence):
        items, earlier = list(now.values()), list(before.values())
        # If the forward only appended, extend the original; else replace all items.
        kept = len(items) >= len(earlier) and all(map(is_, items, earlier))
        if not kept:
            original.clear()
        new = items[len(earlier) :] if kept else items
        original.extend([_own(item, own) for item in new])
        return
    # Mappings and objects: only items that the forward removed, added or replaced
    # change.
    for key in before:
        if key not in now:
            _delete(original, key)
    for key, item in now.items():
        if key not in before or before[key] is not item:
            set_item(original, key, _own(item, own))


def _delete(container: Any, key: Any) -> None:
    """Remove an item or an attribute, if present."""
    if isinstance(container, MutableMapping):
        container.pop(key, None)
    elif hasattr(container, key):
        object.__delattr__(container, key)


def _restored(value: Any, originals: dict[int, Any]) -> Any:
    """Return ``value`` with originals in place of copies, at any depth."""
    if id(value) in originals:
        return _own(value, originals)
    if isinstance(value, (list, dict)):
        for key, item in list((items_of(value) or {}).items()):
            new = _restored(item, originals)
            if new is not item:
                value[key] = new
        return value
    if isinstance(value, tuple):
        return with_items(value, [_restored(item, originals) for item in value])
    return value


def with_items(value: Any, items: list[Any]) -> Any:
    """Return the tuple with other items; the tuple itself if none is another object."""
    if all(map(is_, items, value)):
        return value
    # A named tuple is rebuilt by ``_make``, which takes the items as a single argument.
    make: Any = getattr(value, "_make", tuple)
    return make(items)
