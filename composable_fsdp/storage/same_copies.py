"""Compares optimizer state of ranks that hold copies of the same elements.

Replicas of a unit, and ranks of tensor parallelism beside a parameter that is not cut,
hold equal state, and one of them stores it. A scalar that another copy has differently
would be lost::

    replica 0   0.weight: step 10     stores 0.weight   --+
    replica 1   0.weight: step  9     stores 1.weight   --+--> refused by name

Each rank sends a hash per set of ranks; the texts are sent only if hashes differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.names import is_absent
from composable_fsdp.storage.contents import Contents
from composable_fsdp.storage.held_state import is_elementwise
from composable_fsdp.storage.mesh_copies import copies_of

Copies = dict[tuple[int, ...], dict[str, str]]
"""Per ranks with the same elements: a text for each state, by the parameter's name."""
Hashes = Mapping[tuple[int, ...], bytes]


def copied_states(
    contents: Contents,
    states: Mapping[int, dict[str, Any]],
    text: Callable[[Any, str], str],
) -> Copies:
    """Return the states of this rank's parameters in units that other ranks hold, too.

    Raises: CheckpointError, for a state that is neither element-wise nor a scalar.
    """
    found: Copies = {}
    # Read together at the end: a GPU would be waited for at each number.
    waiting: list[tuple[str, Tensor, list[dict[str, str]]]] = []
    for held in contents.regions:
        replicate = held.handle.groups.replicate
        # Most models: no rank has a copy.
        if replicate is None and not contents.mesh_groups:
            continue
        replicas = (
            [] if replicate is None else [dist.get_process_group_ranks(replicate)]
        )
        for param in held.params:
            # A rank without elements has no state to compare.
            if is_absent(param.ref.leaf):
                continue
            form, name = param.ref.form, param.names[0]
            others = copies_of(held.handle, form, contents.mesh_groups)
            told = [found.setdefault(tuple(r), {}) for r in (*replicas, *others)]
            for key, value in states.get(id(param.tensor), {}).items():
                where = f"{name} (state {key!r})"
                # Elements would take a pass over memory; dtypes differ for free.
                if is_elementwise(key, value, param.ref.leaf, name):
                    said = f"elements of {value.dtype}"
                elif isinstance(value, Tensor) and value.ndim == 0:
                    waiting.append((where, value, told))
                    continue
                else:
                    said = text(value, where)
                for each in told:
                    each[where] = said
    _read(waiting)
    return found


def _read(waiting: Sequence[tuple[str, Tensor, list[dict[str, str]]]]) -> None:
    """Write the values of tensors of a single element into the dicts beside each."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (_, value, _) in enumerate(waiting):
        alike.setdefault((value.device, value.dtype), []).append(i)
    for (_, dtype), numbers in alike.items():
        values = torch.stack([waiting[i][1].detach() for i in numbers]).tolist()
        for i, value in zip(numbers, values, strict=True):
            where, _, told = waiting[i]
            for each in told:
                each[where] = f"{value!r} of {dtype}"


def hashes_of(copies: Copies) -> Hashes:
    """Return a hash per set of ranks, which is equal where the texts are."""
    return {
        ranks: hashlib.blake2b(
            repr(sorted(told.items())).encode(), digest_size=16
        ).digest()
        for ranks, told in copies.items()
    }


def copies_differ(ranks: Sequence[int], told: Sequence[Hashes]) -> bool:
    """Return whether two ranks have told different hashes of the same ranks."""
    by_rank = dict(zip(ranks, told, strict=True))
    # A rank that has told nothing of the set lacks all of its state.
    return any(
        by_rank[other].get(group) != mine
        for each in told
        for group, mine in each.items()
        for other in group
        if other in by_rank
    )


def require_same_copies(ranks: Sequence[int], told: Sequence[Copies]) -> None:
    """Raise CheckpointError for a state that two copies have differently."""
    by_rank = dict(zip(ranks, told, strict=True))
    for rank, each in by_rank.items():
        for group, mine in each.items():
            for other in group:
                theirs = by_rank.get(other, {}).get(group, {})
                names = dict.fromkeys([*mine, *theirs])
                where = next((n for n in names if mine.get(n) != theirs.get(n)), None)
                if other not in by_rank or where is None:
                    continue
                name = where.rpartition(" (state ")[0]
                raise CheckpointError(
                    f"The optimizer's {where} is {mine.get(where, 'absent')[:80]} on "
                    f"rank {rank} and {theirs.get(where, 'absent')[:80]} on rank "
                    f"{other}, which hold copies of the parameter; a checkpoint has "
                    "it once. Nothing was written. Step the optimizers of all replicas "
                    f"alike, or pass local=[{name!r}], which saves each rank's own "
                    "scalars."
                )
