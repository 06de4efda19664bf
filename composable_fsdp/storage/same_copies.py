"""Compares optimizer state of ranks that hold copies of the same elements.

Replicas of a unit, and ranks of tensor parallelism beside a parameter that is not cut,
hold equal state, and one of them stores it. A scalar that another copy has differently
would be lost::

    replica 0   0.weight: step 10     stores 0.weight   --+
    replica 1   0.weight: step  9     stores 1.weight   --+--> refused by name

Each rank sends a hash per set of ranks; the texts are sent only if hashes differ.

Compares the shards of replicas before a save, of which each writes a part.

Replicas that differ (a write to one of them, another learning rate there) are seen by
no collective, and the checkpoint would be a mixture that no rank has. Hashes tell:
every byte of a shard is read once, at the speed of memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.names import is_absent
from composable_fsdp.storage.contents import Contents, is_elementwise
from composable_fsdp.storage.mesh_copies import copies_of
from composable_fsdp.tree.fingerprint import ranks_text
from composable_fsdp.tree.state import _FSDPState

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


class ReplicaShards(NamedTuple):
    """What a rank tells of its shards that other ranks hold, too."""

    place: bytes
    """Equal on ranks that hold the same shards; empty without replicas."""
    digest: bytes
    """A digest of ``hashes``."""
    hashes: dict[str, int]
    """A hash of the shard of each parameter, by name."""
    is_strict: bool
    """Whether a unit has ``check_weights="error"``."""


def replica_shards(states: Iterable[_FSDPState]) -> ReplicaShards:
    """Hash the shards of units with replicas, unless ``check_weights`` is ``"off"``.

    One copy of all hashes per unit to the host.
    """
    places: list[Any] = []
    hashes: dict[str, int] = {}
    is_strict = False
    for state in states:
        handle = state.handle
        groups = handle.groups
        if not state.initial.is_checked or groups.replicas < 2:
            continue
        refs = list(param_refs(handle))
        # Ranks of another part, or with other experts, hold other values of the name.
        parts = [
            g.rank() for g in (*groups_of(handle.layout.forms), groups.experts) if g
        ]
        at = groups.shard.rank() if groups.shard is not None else 0
        places.append((handle.full_fqn, at, parts))
        # By parameter, and not by region, so that the message has a name. The names are
        # read each time, because an outer unit may be applied in between.
        names = [slot_path(handle, ref.slot) for ref in refs]
        values = hash_values([ref.leaf for ref in refs]).tolist()
        hashes.update(zip(names, values, strict=True))
        is_strict = is_strict or state.options.check_weights == "error"
    place = _digest(places) if places else b""
    return ReplicaShards(place, _digest(hashes), hashes, is_strict)


def _digest(value: object) -> bytes:
    """Return a digest of a value of plain types."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def replicas_differ(told: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether ranks of the same place have told different digests.

    ``told``: place and digest of each rank.
    """
    # A set of pairs: equal pairs of many ranks count once.
    places = Counter(place for place, _ in set(told))
    return any(place and count > 1 for place, count in places.items())


def warning_of(ranks: Sequence[int], told: Sequence[ReplicaShards]) -> str:
    """Return the text of a warning about replicas that differ.

    Raises: CheckpointError, with ``check_weights="error"``.
    """
    values: dict[tuple[str, bytes], dict[int, list[int]]] = {}
    for rank, each in zip(ranks, told, strict=True):
        for name, value in each.hashes.items():
            values.setdefault((name, each.place), {}).setdefault(value, []).append(rank)
    unlike = {key: found for key, found in values.items() if len(found) > 1}
    # In the order of the units, so that all ranks name the same parameter.
    (name, _), found = next(iter(unlike.items()))
    first, *others = map(ranks_text, found.values())
    names = dict.fromkeys(name for name, _ in unlike)
    more = f" (and {len(names) - 1} more parameters)" if len(names) > 1 else ""
    text = (
        f"Replicas differ: parameter {quoted(name)}{more} has other values on {first} "
        f"than on {listed(others)}, which hold the same part"
    )
    causes = (
        "A write to one replica, or a step with other options there, leads to this. "
        "Give all replicas the same values before the save: load the last "
        "checkpoint, or broadcast the parameters."
    )
    if any(each.is_strict for each in told):
        raise CheckpointError(f"{text}; nothing was written. {causes}")
    return (
        f"{text}. Each replica writes a share, so the checkpoint is a mixture that no "
        f"rank has. {causes} check_weights='error' refuses such a save, "
        "check_weights='off' compares nothing."
    )
