"""Merges the parts of all ranks into the manifest, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.cuts import merge_cuts
from composable_fsdp.storage.expert_names import with_experts
from composable_fsdp.storage.file_part import (
    FilePart,
    RegionPart,
    SinglePart,
    StateKey,
    merge_local,
)
from composable_fsdp.storage.manifest import (
    BLOCK,
    EntryPlace,
    File,
    Json,
    Manifest,
    Region,
    RegionState,
    Single,
    Slot,
    Stored,
)

_LOST = (
    "The process group was destroyed (torch.distributed.destroy_process_group) before "
    "this save, so this rank cannot reach the others: call save before it."
)


def _way_out() -> str:
    """Return what brings the shards of the other ranks into the checkpoint."""
    alone = dist.is_available() and not dist.is_initialized()
    return _LOST if alone else "Call save on every rank that the model is sharded over."


RankPart = tuple[FilePart, File, dict[str, int]]
"""A rank's part, the rank's file, and the first payload byte of each entry, by key."""


def merge(told: Sequence[RankPart], block: int = BLOCK) -> Manifest:
    """Return the manifest of the parts of all ranks; ``told`` is in rank order.

    ``block`` are the bytes of payload that a checksum covers (default ``BLOCK``).

    Raises: CheckpointError, if a shard was written by no rank or by two ranks, or if
    the ranks have different optimizer state.
    """
    shifts = loose_shifts(told)
    loose = [
        _stored(part, begins, rank, key)
        for rank, (part, _, begins) in enumerate(told)
        for key in part.loose
    ]
    # Rank 0 alone has written ``extra`` and the options.
    first = told[0][0]

    # Of any rank: ``local`` has tensors of all, and large ``singles`` are divided.
    def single_of(rank: int, single: SinglePart) -> Single:
        part, _, begins = told[rank]
        states = single.states.items()
        return Single(
            single.names,
            _stored(part, begins, rank, single.key),
            {k: _stored(part, begins, rank, key) for k, key in states},
            shifted(single.values, shifts[rank]),
        )

    def of_rank(value: Json, rank: int) -> Json:
        return shifted(value, shifts[rank])

    cuts = merge_cuts(
        [part.cuts for part, _, _ in told],
        lambda rank, key: EntryPlace(rank, told[rank][2][key]),
        of_rank,
    )
    return Manifest(
        library=_library_version(),
        torch=str(torch.__version__),
        world_size=len(told),
        block_nbytes=block,
        files=tuple(file for _, file, _ in told),
        regions=tuple(_regions(told, shifts)),
        singles=tuple(single_of(*each) for each in single_parts(told)),
        cuts=cuts,
        wrappers=first.wrappers,
        local=merge_local([part.local for part, _, _ in told], single_of, of_rank),
        loose=tuple(loose),
        param_groups=with_experts(
            first.param_groups,
            first.group_numbers,
            [part.experts for part, _, _ in told],
        ),
        extra=first.extra,
        own_states=first.own_states,
        rng=tuple(
            shifted(part.rng, shift)
            for (part, _, _), shift in zip(told, shifts, strict=True)
        ),
        per_rank=_per_rank(told, shifts),
    )


def loose_shifts(told: Sequence[RankPart]) -> list[int]:
    """Return per rank the number to add to the numbers of its loose tensors."""
    # Each rank numbers its loose tensors from 0, while the manifest has a single list
    # of all ranks' loose tensors.
    counts = [len(part.loose) for part, _, _ in told]
    return [0, *accumulate(counts[:-1])]


def single_parts(told: Sequence[RankPart]) -> list[tuple[int, SinglePart]]:
    """Return the tensors that are saved once, with the ranks that wrote them."""
    found = [
        (rank, single)
        for rank, (part, _, _) in enumerate(told)
        for single in part.singles
    ]
    # The order of the model, whichever rank wrote a tensor.
    return sorted(found, key=lambda each: each[1].number)


def _per_rank(told: Sequence[RankPart], shifts: list[int]) -> tuple[Json, ...]:
    """Return the own values of each rank; empty if no rank has given any."""
    if all(part.per_rank is None for part, _, _ in told):
        return ()
    # A rank without values has none to lose, and gets an empty dict back.
    return tuple(
        {} if part.per_rank is None else shifted(part.per_rank, shift)
        for (part, _, _), shift in zip(told, shifts, strict=True)
    )


def _library_version() -> str:
    """Return the installed version of this package."""
    try:
        return version("composable-fsdp")
    except PackageNotFoundError:  # The package runs from a source tree.
        return "unknown"


def _stored(part: FilePart, begins: dict[str, int], rank: int, key: str) -> Stored:
    """Return the dtype, the shape and the place of an entry of ``rank``."""
    dtype, shape = part.tensors[key]
    return Stored(dtype, shape, EntryPlace(rank, begins[key]))


def shifted(value: Json, shift: int) -> Json:
    """Return ``value`` with ``shift`` added to the numbers of loose tensors."""
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return {"$tensor": value["$tensor"] + shift}
        return {key: shifted(item, shift) for key, item in value.items()}
    if isinstance(value, list):
        return [shifted(item, shift) for item in value]
    return value


def _regions(told: Sequence[RankPart], shifts: list[int]) -> list[Region]:
    """Group the region parts of all ranks by region, and return the merged regions."""
    # (unit, index) -> shard number -> (rank of the save, the rank's region part).
    shards: dict[tuple[str, int], dict[int, tuple[int, RegionPart]]] = {}
    for rank, (part, _, _) in enumerate(told):
        for region in part.regions:
            known = shards.setdefault((region.unit, region.index), {})
            # Of a replicate group only the first replica writes. Two writers of a shard
            # therefore hold independent copies of the model, and the copies may differ.
            if region.shard in known:
                raise CheckpointError(
                    f"Ranks {known[region.shard][0]} and {rank} of the save hold the "
                    f"same shard of unit {quoted(region.unit)} "
                    f"({quoted(region.first)} ..) without being replicas of each "
                    "other. "
                    "Pass fully_shard a 2-D device_mesh (replicate, shard), or save on "
                    "the ranks of one copy."
                )
            known[region.shard] = rank, region
    return [_region(told, shifts, found) for found in shards.values()]


def _region(
    told: Sequence[RankPart],
    shifts: list[int],
    found: dict[int, tuple[int, RegionPart]],
) -> Region:
    """Return the merged region, with the places of all shards in shard order.

    Raises: CheckpointError, for a missing shard or differing optimizer state.
    """
    # Only the first rank of the unit describes the slots.
    describer = next((r for r in found.values() if r[1].slots is not None), None)
    _, any_part = next(iter(found.values()))
    count = any_part.shards
    missing = sorted(set(range(count)) - set(found))
    if missing or describer is None:
        raise CheckpointError(
            f"Shards {missing} of unit {quoted(any_part.unit)} "
            f"({quoted(any_part.first)} "
            f"..) were written by no rank. {_way_out()}"
        )
    first = describer[1]
    assert first.slots is not None
    slots_of = _states(first.slots, [found[r] for r in range(count)])

    def place(r: int, key: str) -> EntryPlace:
        return EntryPlace(found[r][0], told[found[r][0]][2][key])

    states = tuple(
        RegionState(
            name,
            first.states[name, kind][0],
            slots,
            tuple(place(r, found[r][1].states[name, kind][2]) for r in range(count)),
        )
        for (name, kind), slots in slots_of.items()
    )
    told_values = [(rank, part.shared) for rank, part in found.values()]
    require_same_values(first.slots, told_values)
    # The state of a parameter that is not element-wise comes from the first rank that
    # holds elements of the parameter.
    values = {
        i: shifted(each, shifts[other_rank])
        for other_rank, other in found.values()
        for i, each in other.values.items()
    }
    slots = tuple(
        replace(slot, values=values.get(i, {})) for i, slot in enumerate(first.slots)
    )
    return Region(
        first.unit,
        first.dtype,
        first.shard_numel,
        first.shard_numel * count,
        slots,
        tuple(place(r, found[r][1].key) for r in range(count)),
        states,
    )


def require_same_values(
    slots: Sequence[Slot], told: Sequence[tuple[int, dict[int, dict[str, str]]]]
) -> None:
    """Raise CheckpointError for scalar state that differs between ranks."""
    # (slot, state) -> the first rank with elements of the parameter, and the value.
    known: dict[tuple[int, str], tuple[int, str]] = {}
    for rank, shared in told:
        for i, values in shared.items():
            for name, text in values.items():
                writer, said = known.setdefault((i, name), (rank, text))
                if said != text:
                    raise CheckpointError(
                        f"Optimizer state {name!r} of {quoted(slots[i].fqns[0])} "
                        f"is {said[:80]} on rank {writer} of the save and {text[:80]} "
                        f"on rank {rank}, which hold parts of the parameter; a "
                        "checkpoint has such state once. Nothing was committed. Make "
                        "it equal on all ranks (all-reduce it in the optimizer's "
                        "step), keep it out of optimizer.state, or pass "
                        f"local=[{slots[i].fqns[0]!r}], which saves each rank's own."
                    )


def _states(
    slots: Sequence[Slot], parts: Sequence[tuple[int, RegionPart]]
) -> dict[StateKey, tuple[int, ...]]:
    """Return the states of a region, with their slots; ``parts`` is in shard order.

    Raises: CheckpointError, if a rank that holds elements of a parameter lacks a state
    that another rank has for the parameter.
    """
    having: dict[StateKey, set[int]] = {}
    for _, part in parts:
        for key, (_, found, _) in part.states.items():
            having.setdefault(key, set()).update(found)
    for key, wanted in having.items():
        for rank, part in parts:
            # The rank must have the state for exactly the parameters that the rank
            # holds elements of. Different sets mean that the ranks have stepped
            # different optimizers.
            held = {i for i in wanted if _holds_elements(part, slots[i])}
            mine = set(part.states[key][1]) if key in part.states else set()
            if mine == held:
                continue
            lacking = (held - mine).pop()
            other_rank, other = next(
                each
                for each in parts
                if key in each[1].states and lacking in each[1].states[key][1]
            )
            raise CheckpointError(
                f"Optimizer state differs over ranks: unit {quoted(part.unit)} "
                f"({quoted(part.first)} ..) has {_kinds(other)} on rank {other_rank} "
                "of "
                f"the save and {_kinds(part)} on rank {rank}. Build the optimizer "
                "with the same parameters in the same order on every rank, and step "
                "all of them."
            )
    return {key: tuple(sorted(found)) for key, found in having.items()}


def _holds_elements(part: RegionPart, slot: Slot) -> bool:
    """Return whether the rank holds elements of the parameter; True for 0 elements."""
    numel, start = prod(slot.shape), part.shard * part.shard_numel
    if not numel:
        return True
    return slot.offset < start + part.shard_numel and start < slot.offset + numel


def _kinds(part: RegionPart) -> dict[Any, tuple[int, ...]]:
    """Return the slots per state, sorted, for messages."""
    return {key: slots for key, (_, slots, _) in sorted(part.states.items())}
