"""Tensors that ``torch.func.functional_call`` puts in place of a unit's parameters.

The unit computes with them; only the other places show its full leaves. Nothing of this
package runs when torch registers the previous tensors again: if these are full leaves,
the unit stays full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import place_path
from composable_fsdp.naming import quoted


def save_functional_params(handle: FlatParamHandle, *, over_full: bool) -> None:
    """Show full leaves at all places, except where a foreign tensor is registered.

    Raises: CompositionError, if a foreign tensor does not have the shape of the full
    parameter. The modules are then unchanged.
    """
    foreign = {}
    for at, (table, key, sharded, full) in enumerate(handle.swaps):
        found = table.get(key)
        if found is sharded or found is full:
            continue
        if isinstance(found, Tensor) and found.shape != full.shape:
            name = quoted(place_path(handle, at))
            # ``use_full`` may have registered full leaves before it found the foreign
            # tensor.
            _put_back(handle)
            raise CompositionError(
                f"Unit {handle.name} was called with another tensor in the place of "
                f"parameter {name} (torch.func.functional_call does so): expected the "
                f"full shape {tuple(full.shape)}, got {tuple(found.shape)}. Pass "
                "whole parameters, as unshard_params(module) shows them, and not "
                "what is made of this rank's shards."
            )
        foreign[at] = found
    for at, (table, key, _, full) in enumerate(handle.swaps):
        if at not in foreign:
            table[key] = full
    handle.running.foreign, handle.running.over_full = foreign, over_full


def _put_back(handle: FlatParamHandle) -> None:
    """Replace registered full leaves by the sharded leaves."""
    for table, key, sharded, full in handle.swaps:
        if table.get(key) is full:
            table[key] = sharded


def restore_functional_params(handle: FlatParamHandle) -> None:
    """Register the foreign tensors again, and forget them."""
    # When ``functional_call`` ends, torch copies the tensors that the modules show into
    # the caller's dict, so the modules must not show this rank's shards.
    for at, found in handle.running.foreign.items():
        handle.layout.tables[at][handle.layout.keys[at]] = found
    handle.running.foreign = {}


@contextmanager
def functional_params_aside(handle: FlatParamHandle) -> Iterator[None]:
    """Register the unit's own leaves while the block runs."""
    # ``functional_call`` of the outermost module has registered its tensors already. A
    # sharded unit takes no ``nn.Parameter`` for one: it may be a replacement.
    own = handle.form.placed if handle.is_full else handle.layout.sharded_placed
    aside = []
    for (table, key, sharded, full), leaf in zip(handle.swaps, own, strict=True):
        found = table.get(key)
        if found is sharded or found is full or not isinstance(found, Tensor):
            continue
        if handle.is_full or not isinstance(found, nn.Parameter):
            aside.append((table, key, found))
            table[key] = leaf
    try:
        yield
    finally:
        for table, key, found in aside:
            table[key] = found


def will_be_full(handle: FlatParamHandle) -> bool:
    """Return whether ``functional_call`` runs and will register full leaves again."""
    running, layout = handle.running, handle.layout
    shown = [table.get(key) for table, key, *_ in handle.swaps]
    if any(shown[at] is not found for at, found in running.foreign.items()):
        running.foreign = {}
    own = {*map(id, layout.sharded_placed), *map(id, handle.form.placed), id(None)}
    if not handle.is_full or own.issuperset(map(id, shown)):
        return False
    return running.over_full or not running.foreign
