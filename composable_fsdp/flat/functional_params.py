"""Tensors that a caller puts in the place of a unit's parameters for one call.

``torch.func.functional_call`` writes the tensors that it was given into the modules,
calls, and puts back what it found. A unit that is called so inside a forward computes
with them, as a plain module does: its own leaves are shown at the other places only.
"""

from __future__ import annotations

from torch import Tensor

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name, quoted


def save_functional_params(handle: FlatParamHandle) -> None:
    """Show the full leaves wherever no foreign tensor stands, and note those.

    Raises: CompositionError, if one has not the shape of the full parameter; nothing is
    changed then.
    """
    foreign = {}
    for at, (table, key, sharded, full) in enumerate(handle.swaps):
        found = table.get(key)
        if found is sharded or found is full:
            continue
        if isinstance(found, Tensor) and found.shape != full.shape:
            name = quoted(join_name(handle.full_fqn, handle.places[at].fqn))
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
    handle.foreign = foreign


def _put_back(handle: FlatParamHandle) -> None:
    for table, key, sharded, full in handle.swaps:
        if table.get(key) is full:
            table[key] = sharded


def restore_functional_params(handle: FlatParamHandle) -> None:
    """Put foreign tensors back where ``use_sharded`` has put sharded leaves."""
    for at, found in handle.foreign.items():
        handle.tables[at][handle.keys[at]] = found
    handle.foreign = {}
