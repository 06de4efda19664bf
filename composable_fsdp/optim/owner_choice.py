"""Chooses the owners of whole matrices, from plans alone.

Each matrix has an owner among the ranks that hold a part of the matrix: the largest
matrix first, each to the rank with the least work::

    rank 0  [ A A A | B B ]      A (rows 0 to 4)   owner: rank 0
    rank 1  [ A A | C C C ]      B                 owner: rank 0, which holds all of B
                                 C                 owner: rank 1
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import NamedTuple

from composable_fsdp.planning.layout import ParameterSlot, RegionLayout

Owner = tuple[int, int]
"""The replica and the rank of the shard group that computes."""


class Candidate(NamedTuple):
    """A matrix that needs an owner.

    ``replicas`` share the matrices. ``ranks`` is equal for matrices whose owners are
    chosen among the same ranks.
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
    """Return the owner of each matrix, from plans, which are equal on all ranks."""
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
