"""Owners of whole matrices, and the messages of ``map_on_owners``, from plans alone.

Each matrix has an owner among the ranks that hold a part of the matrix: the largest
matrix first, each to the rank with the least work::

    rank 0  [ A A A | B B ]      A (rows 0 to 4)   owner: rank 0
    rank 1  [ A A | C C C ]      B                 owner: rank 0, which holds all of B
                                 C                 owner: rank 1
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout

if TYPE_CHECKING:
    from composable_fsdp.planning.unit_plan import UnitPlan

Owner = tuple[int, int]
"""The replica and the rank of the shard group that computes."""


class Candidate(NamedTuple):
    """A matrix that needs an owner.

    Args:
        region: the region that holds the matrix.
        slot: the place of the matrix in the region.
        replicas: number of replicas, which share the matrices.
        ranks: equal for matrices whose owners are chosen among the same ranks.
    """

    region: RegionLayout
    slot: ParameterSlot
    replicas: int
    ranks: Hashable

    def sizes(self) -> list[int]:
        """Return the elements on each rank of the shard group."""
        ranks = range(self.region.world_size)
        intervals = [self.region.interval(self.slot, rank) for rank in ranks]
        return [stop - start for start, stop in intervals]


def choose_owners(matrices: Sequence[Candidate]) -> list[Owner]:
    """Return the owner of each matrix.

    Collective: none: plans are equal on all ranks.
    """
    found = [(0, 0)] * len(matrices)
    load: dict[Hashable, dict[Owner, int]] = {}
    work = [_work(each.slot.shape) for each in matrices]
    # The largest first, each to the holder with the least work so far: the small ones
    # then fill the gaps. ``sorted`` is stable, so equal matrices keep the order of the
    # parameters.
    for number in sorted(range(len(matrices)), key=lambda n: -work[n]):
        region, slot, replicas, ranks = matrices[number]
        # Ranks of different meshes do not share their loads.
        busy = load.setdefault(ranks, {})
        # Holders only: a rank without a part would receive, and send back, all of it.
        places = [(q, r) for q in range(replicas) for r in region.holders(slot)]
        best = min(places, key=lambda place: (busy.get(place, 0), place))
        busy[best] = busy.get(best, 0) + work[number]
        found[number] = best
    return found


def _work(shape: Sequence[int]) -> int:
    """Return a measure of the work on a matrix: elements times the smaller side."""
    # The products of Newton-Schulz and of a decomposition grow in this way.
    return prod(shape) * (min(shape[0], prod(shape[1:])) if len(shape) > 1 else 1)


@dataclass(frozen=True, slots=True)
class OwnerTraffic:
    """The bytes of a rank in a call of ``map_on_owners``.

    Args:
        all_to_all_calls: two per unit and dtype of which a matrix is cut.
        all_to_all_bytes: bytes that the rank puts into them, those that stay included.
        broadcast_calls: with hybrid sharding one per replica and unit.
        broadcast_bytes: bytes of results that the replicas exchange.
    """

    all_to_all_calls: int = 0
    all_to_all_bytes: int = 0
    broadcast_calls: int = 0
    broadcast_bytes: int = 0


class _Owned(NamedTuple):
    """A matrix in the exchange of its unit."""

    sizes: list[int]
    owner: Owner
    itemsize: int


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """The owner of each matrix in ``map_on_owners``, and the bytes of a call."""

    owners: dict[str, Owner]
    """By name of the matrix, from the model: the replica and the rank of the shard
    group."""
    _exchanges: tuple[tuple[int, tuple[_Owned, ...]], ...]
    """Per unit and dtype the number of replicas, and the matrices."""

    def traffic(self, rank: int, *, replica: int = 0) -> OwnerTraffic:
        """Return the bytes that a rank of a shard group sends in a call."""
        calls = sent = broadcasts = results = 0
        for replicas, owned in self._exchanges:
            here = [each for each in owned if each.owner[0] == replica]
            # A matrix that its owner holds whole needs no message.
            if any(max(each.sizes) < sum(each.sizes) for each in here):
                calls += 2
                for sizes, owner, itemsize in here:
                    whole = sum(sizes) if owner[1] == rank else 0
                    sent += itemsize * (sizes[rank] + whole)
            for each in range(replicas) if replicas > 1 else ():
                parts = [
                    itemsize * sizes[rank]
                    for sizes, owner, itemsize in owned
                    if owner[0] == each
                ]
                broadcasts += any(parts)
                results += sum(parts)
        return OwnerTraffic(calls, sent, broadcasts, results)

    @property
    def most(self) -> OwnerTraffic:
        """The traffic of the rank with most bytes."""
        ranks = max((len(o[0].sizes) for _, o in self._exchanges), default=0)
        found = [
            self.traffic(rank, replica=replica)
            for rank in range(ranks)
            for replica in range(max(n for n, _ in self._exchanges))
        ]
        return max(
            found,
            key=lambda each: each.all_to_all_bytes + each.broadcast_bytes,
            default=OwnerTraffic(),
        )


def plan_owners(
    units: Iterable[UnitPlan],
    names: Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> OwnerPlan:
    """Return the owners of matrices, and the bytes of a call of ``map_on_owners``.

    Returns: the owners and the traffic.
    Raises: PlanError, for a name that no unit has.
    """
    chosen = [
        (index, join_name(unit.fqn, slot.fqn), region, slot, unit)
        for index, unit in enumerate(units)
        for region in unit.regions
        for slot in region.parameters
    ]
    if names is None:
        chosen = [each for each in chosen if each[2].trainable]
        chosen = [each for each in chosen if len(each[3].shape) == 2]
        chosen.sort(key=lambda each: (each[0], each[3].index))
    else:
        known = {each[1]: each for each in chosen}
        chosen = [known[name] for name in _known(names, known)]
    matrices = [
        Candidate(region, slot, unit.replicas, (unit.shard_world_size, unit.replicas))
        for _, _, region, slot, unit in chosen
    ]
    owners = choose_owners(matrices)
    exchanges: dict[tuple[int, torch.dtype], list[_Owned]] = {}
    for (index, _, region, _, _), matrix, owner in zip(
        chosen, matrices, owners, strict=True
    ):
        itemsize = (dtype or region.dtype).itemsize
        own = exchanges.setdefault((index, region.dtype), [])
        own.append(_Owned(matrix.sizes(), owner, itemsize))
    replicas = {
        (index, region.dtype): unit.replicas for index, _, region, _, unit in chosen
    }
    return OwnerPlan(
        {name: owner for (_, name, *_), owner in zip(chosen, owners, strict=True)},
        tuple((replicas[key], tuple(owned)) for key, owned in exchanges.items()),
    )


def _known(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return ``names``; raise PlanError if no unit has one of them."""
    given, held = list(names), set(known)
    for name in given:
        if name not in held:
            raise PlanError(
                f"owners() expects names of parameters in units, got {quoted(name)}. "
                "Pass names of model.named_parameters()."
            )
    return given
