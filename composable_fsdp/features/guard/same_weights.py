"""Comparison of the values that ranks have passed to ``fully_shard``.

Each rank keeps its rows of its own values, so a sharded model of different values is a
mixture that no rank has built, and replicas of different values stay different for
ever. Hashes of whole values are compared, made before sharding. A value that was
written to since has no such hash; if it has replicas, the shards themselves are hashed
and compared with the other replicas' ::

                   not written to                  written to since
    sharded        whole values                    -
    hybrid         whole values, in each replica   shards, ranks of the same index
    not cut        whole values as they are now    the same
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch.distributed as dist

from composable_fsdp.errors import DesyncError
from composable_fsdp.features.guard.compare import gather, ranks_by_value, tag_of
from composable_fsdp.features.guard.fingerprint import Units
from composable_fsdp.flat.param_ref import slot_paths
from composable_fsdp.flat.value_hash import hash_values, have_values
from composable_fsdp.naming import listed, quoted, ranks_text
from composable_fsdp.tree.state import _FSDPState, sharded_leaves

_Key: TypeAlias = tuple[int, str, int]
"""The index of a parameter, and what tells which ranks are compared."""


def weights_tag(
    units: Units, parts: dist.ProcessGroup | None = None
) -> tuple[int, bool]:
    """Return a tag of the values, and whether shards with replicas were written to."""
    for _, state in units:
        initial, layout = state.initial, state.handle.layout
        if state.handle.groups.shard is not None or not initial.is_checked:
            continue
        leaves = sharded_leaves(layout)
        if have_values(leaves) and not (initial.synced and all(_unwritten(state))):
            initial.hashes = hash_values(leaves)
            initial.mark(layout)
    # Replicas of this part are compared among themselves.
    written = parts is None and any(
        _has_replicas(state) and not all(_unwritten(state)) for _, state in units
    )
    return tag_of(_initial_hashes(units, parts)), written


def require_same_weights(
    units: Units,
    route: tuple[dist.ProcessGroup, ...],
    parts: dist.ProcessGroup | None = None,
) -> str | None:
    """Find the first parameter whose values differ between ranks; return a warning.

    Collective: an all-gather of objects over each group of ``route``.
    """
    told: list[dict[_Key, int]] = []
    for (_, state), whole in zip(units, _initial_hashes(units, parts), strict=True):
        groups = state.handle.groups
        copies = None if groups.shard is None else groups.replicate
        replica = 0 if copies is None else copies.rank()
        # Nothing is known of the initial values of a written parameter.
        known = {(i, "", replica): v for i, v in enumerate(whole) if v is not None}
        # Replicas of a cut unit are compared shard by shard.
        if parts is None and _has_replicas(state):
            shards = hash_values(sharded_leaves(state.handle.layout)).tolist()
            known |= {(i, "shard", groups.rank): v for i, v in enumerate(shards)}
        told.append(known)
    unlike = list(_unlike(units, gather(told, route)))
    if not unlike:
        return None
    # An error goes before a warning; all ranks have the same options.
    strict = [unit for unit in unlike if unit[1].options.check_weights == "error"]
    text = _text(*(strict or unlike)[0], len(unlike), parts)
    if strict:
        raise DesyncError(text)
    return text


def _unlike(
    units: Units, told: Mapping[int, list[dict[_Key, int]]]
) -> Iterator[tuple[str, _FSDPState, int, dict[int, int]]]:
    """Yield of each unit with other values the first parameter, and hashes by rank."""
    for i, (name, state) in enumerate(units):
        found: dict[_Key, dict[int, int]] = {}
        for rank, units_there in told.items():
            for key, value in units_there[i].items():
                found.setdefault(key, {})[rank] = value
        differ = [k for k, values in found.items() if len(set(values.values())) > 1]
        if differ:
            first = min(differ)
            yield name, state, first[0], found[first]


def _initial_hashes(
    units: Units, parts: dist.ProcessGroup | None
) -> list[list[int | None]]:
    """Return, per unit and slot, the hash of the initial value if not written to."""
    found: list[list[int | None]] = []
    for _, state in units:
        # None after a broadcast, for values on meta, and with ``check_weights="off"``.
        hashes = state.initial.hashes
        values = [] if hashes is None else hashes.tolist()
        kept = _unwritten(state) if values else ()
        found.append(
            [
                v if unwritten and not _is_cut(state, index, parts) else None
                for index, (v, unwritten) in enumerate(zip(values, kept, strict=True))
            ]
        )
    return found


def _is_cut(state: _FSDPState, index: int, parts: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks of ``parts`` hold other values under slot ``index``."""
    return parts is not None and parts in state.handle.layout.forms[index].cut_over


def _unwritten(state: _FSDPState) -> list[bool]:
    """Return, by slot index, whether a parameter has its initial value."""
    return state.initial.unwritten(state.handle.layout)


def _has_replicas(state: _FSDPState) -> bool:
    """Return whether other ranks hold the same shards of a cut unit, with values."""
    return (
        state.initial.is_checked
        and state.handle.groups.replicas > 1
        and state.handle.groups.shard is not None
        and not state.handle.layout.on_meta
    )


def _text(
    name: str,
    state: _FSDPState,
    index: int,
    values: Mapping[int, int],
    units: int,
    parts: dist.ProcessGroup | None,
) -> str:
    """Return the warning or error, equal on all ranks, for one of ``units``."""
    regions = state.handle.layout.regions
    slot = next(s for r in regions for s in r.layout.parameters if s.index == index)
    first, *others = map(ranks_text, ranks_by_value(values).values())
    where = f"other values on {first} than on {listed(others)}"
    path = slot_paths(state.handle, slot, name)[0]
    more = f" (and so have parameters of {units - 1} more units)" if units > 1 else ""
    if parts is not None:
        why = "The parameter is not cut over these ranks, whose gradients differ then"
    elif state.handle.groups.replicas > 1:
        why = "Replicas that differ stay different for ever"
    else:
        why = "Each rank keeps its rows of its own values, a mixture no rank has built"
    return (
        f"Ranks have sharded different weights: parameter {quoted(path)} has "
        f"{where}{more}. {why}: build "
        "the model from the same seed, load the same checkpoint on every rank, or pass "
        "sync_module_states=True to fully_shard (init_sync=True to replicate). "
        "check_weights='error' raises here, check_weights='off' compares no weights."
    )
