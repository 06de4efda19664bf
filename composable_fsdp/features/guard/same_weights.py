"""Comparison of the values that ranks have passed to ``fully_shard``.

Hashes of whole values, made before sharding, are compared. A value that was written to
since has no such hash: its shards are compared with those of its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TypeAlias

import torch.distributed as dist

from composable_fsdp.errors import DesyncError, PlanError
from composable_fsdp.features.guard.compare import gather, tag_of
from composable_fsdp.flat.param_ref import ParamRef, find_param, slot_paths
from composable_fsdp.flat.residency import written
from composable_fsdp.flat.value_hash import (
    WAY_OUT,
    digest_of_start,
    hash_values,
    have_values,
)
from composable_fsdp.naming import listed, quoted, ranks_by_value, ranks_text
from composable_fsdp.runtime.meta_values import require_filled, unfilled_parameters
from composable_fsdp.tree.state import (
    RuntimeContext,
    _FSDPState,
    root_of,
    sharded_leaves,
)

Units: TypeAlias = Sequence[tuple[str, _FSDPState]]
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


# ---- values missing, or drawn twice, in a model that was made on meta ----

# A few are enough: an initialiser draws all parameters.
_MOST = 64
"""Most parameters whose starts a rank sends."""


def require_initialized(context: RuntimeContext) -> None:
    """Raise if a parameter or buffer has no values, or ranks drew the same numbers.

    Collective: of a model that was on meta, an all-gather of objects per shard group.
    """
    root = root_of(context)
    states = root._root_states
    by_group: dict[dist.ProcessGroup | None, list[_FSDPState]] = {}
    # Groups in the order of units, the same on all ranks.
    for state in states:
        by_group.setdefault(state.handle.groups.shard, []).append(state)
    for group, units in by_group.items():
        empty = [name for state in units for name in unfilled_parameters(state)]
        # ``same_models`` has told all ranks. Without a shard group this rank has whole
        # values, as its replicas have; in one a rank may have no rows of a parameter,
        # and must raise with the others.
        if group is not None and any(s.initial.was_on_meta for s in units):
            drawn = list(islice(_drawn(root, units), _MOST))
            told = gather((empty, drawn), [group])
            empty = list(dict.fromkeys(chain(*(each for each, _ in told.values()))))
            _require_own_numbers({rank: starts for rank, (_, starts) in told.items()})
        if empty:
            raise PlanError(
                f"Parameters {listed(map(quoted, empty))} were on meta and nothing has "
                "filled them since they got memory (to_empty): no checkpoint that was "
                "loaded has them, and no initialiser wrote to them. Call "
                "init_weights(module) with the module that holds them, or write to "
                "them inside of 'with unshard_params(model):', on every rank."
            )
    require_filled(states)


def starts(
    top: _FSDPState, units: Iterable[_FSDPState]
) -> Iterator[tuple[int, ParamRef]]:
    """Yield the starts of shards of ``units`` written to since ``fully_shard``."""
    changed = {
        each.handle
        for each in units
        if each.handle.groups.shard is not None
        and not -1 < each.handle.writes.at_build == written(each.handle.layout)
    }
    # An initialiser draws in this order, whatever the order in the flat buffer.
    for module in top.modules if changed else ():
        for ref in map(find_param, module.parameters()):
            if ref is None or ref.handle not in changed:
                continue
            if digest := digest_of_start(ref.leaf.detach()):
                yield digest, ref


def _drawn(root: _FSDPState, units: Iterable[_FSDPState]) -> Iterator[tuple[int, str]]:
    """Yield the starts of parameters that were seen to be drawn."""
    seen = {each.handle: each.initial.drawn for each in units}
    for digest, ref in starts(root, units):
        # Values that were written since are not those that were drawn.
        if seen[ref.handle].get(ref.slot.index) == digest:
            yield digest, ref.name


def _require_own_numbers(told: dict[int, list[tuple[int, str]]]) -> None:
    """Raise PlanError if two ranks drew the same numbers for their rows."""
    first: dict[int, tuple[int, str]] = {}
    for rank, starts in told.items():
        for digest, name in starts:
            # Names may differ: a rank may have no rows of the parameter drawn first.
            before, other = first.setdefault(digest, (rank, name))
            if before != rank:
                raise PlanError(
                    f"Ranks drew the same random numbers: {quoted(name)} begins on "
                    f"rank {rank} as {quoted(other)} does on rank {before}. {WAY_OUT}"
                )
