"""Compares the shards of replicas before a save, of which each writes a part.

Replicas that differ (a write to one of them, another learning rate there) are seen by
no collective, and the checkpoint would be a mixture that no rank has. Hashes tell:
every byte of a shard is read once, at the speed of memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted
from composable_fsdp.tree.fingerprint import ranks_text
from composable_fsdp.tree.state import _FSDPState


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
