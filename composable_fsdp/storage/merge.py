"""Putting the ranks' parts together to one manifest. On rank 0; sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.manifest import (
    File,
    Json,
    Manifest,
    Place,
    Region,
    RegionState,
    Single,
    Slot,
    Stored,
)
from composable_fsdp.storage.part import Part, RegionPart, StateKey

RankPart = tuple[Part, File, dict[str, int]]
"""A rank's part, its file, and where the entries begin in it."""


def merge(told: Sequence[RankPart]) -> Manifest:
    """One manifest of all ranks' parts, in rank order.

    Raises: CheckpointError, if a shard was written by nobody or by two ranks, or ranks
    have different optimizer state.
    """
    loose: list[Stored] = []
    shifts = []
    for rank, (part, _, begins) in enumerate(told):
        shifts.append(len(loose))
        for key in part.loose:
            loose.append(_stored(part, begins, rank, key))
    first, _, begins = told[0]
    singles = tuple(
        Single(
            single.names,
            _stored(first, begins, 0, single.key),
            {k: _stored(first, begins, 0, key) for k, key in single.states.items()},
            single.values,
        )
        for single in first.singles
    )
    return Manifest(
        library=_library_version(),
        torch=str(torch.__version__),
        world_size=len(told),
        files=tuple(file for _, file, _ in told),
        regions=tuple(_regions(told, shifts)),
        singles=singles,
        loose=tuple(loose),
        param_groups=first.param_groups,
        extra=first.extra,
        own_states=first.own_states,
        rng=tuple(
            _shifted(part.rng, shift)
            for (part, _, _), shift in zip(told, shifts, strict=True)
        ),
    )


def _library_version() -> str:
    try:
        return version("composable-fsdp")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _stored(part: Part, begins: dict[str, int], rank: int, key: str) -> Stored:
    dtype, shape = part.tensors[key]
    return Stored(dtype, shape, Place(rank, begins[key]))


def _shifted(value: Json, shift: int) -> Json:
    """``value`` with the numbers of its loose tensors counted over all ranks."""
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return {"$tensor": value["$tensor"] + shift}
        return {key: _shifted(item, shift) for key, item in value.items()}
    if isinstance(value, list):
        return [_shifted(item, shift) for item in value]
    return value


def _regions(told: Sequence[RankPart], shifts: list[int]) -> list[Region]:
    shards: dict[tuple[str, int], dict[int, tuple[int, RegionPart]]] = {}
    for rank, (part, _, _) in enumerate(told):
        for region in part.regions:
            known = shards.setdefault((region.unit, region.index), {})
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
    describer = next((r for r in found.values() if r[1].slots is not None), None)
    _, any_part = next(iter(found.values()))
    count = any_part.shards
    missing = sorted(set(range(count)) - set(found))
    if missing or describer is None:
        raise CheckpointError(
            f"Shards {missing} of unit {quoted(any_part.unit)} "
            f"({quoted(any_part.first)} "
            "..) were written by no rank. Call save on every rank that the model is "
            "sharded over."
        )
    first = describer[1]
    assert first.slots is not None
    slots_of = _states(first.slots, [found[r] for r in range(count)])

    def place(r: int, key: str) -> Place:
        return Place(found[r][0], told[found[r][0]][2][key])

    states = tuple(
        RegionState(
            name,
            first.states[name, kind][0],
            slots,
            tuple(place(r, found[r][1].states[name, kind][2]) for r in range(count)),
        )
        for (name, kind), slots in slots_of.items()
    )
    values = {
        i: _shifted(told_values, shifts[other_rank])
        for other_rank, other in found.values()
        for i, told_values in other.values.items()
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


def _states(
    slots: Sequence[Slot], parts: Sequence[tuple[int, RegionPart]]
) -> dict[StateKey, tuple[int, ...]]:
    """The states of one region, and which slots have them; ``parts`` by shard.

    Raises: CheckpointError, if a rank that holds elements lacks what another has.
    """
    having: dict[StateKey, set[int]] = {}
    for _, part in parts:
        for key, (_, found, _) in part.states.items():
            having.setdefault(key, set()).update(found)
    for key, wanted in having.items():
        for rank, part in parts:
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
    """Whether the rank of ``part`` holds elements of a parameter; or it has none."""
    numel, start = prod(slot.shape), part.shard * part.shard_numel
    if not numel:
        return True
    return slot.offset < start + part.shard_numel and start < slot.offset + numel


def _kinds(part: RegionPart) -> dict[Any, tuple[int, ...]]:
    return {key: slots for key, (_, slots, _) in sorted(part.states.items())}
