"""The owners of ``map_on_owners`` and the messages of a call, from a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.optim.owner_choice import Candidate, Owner, choose_owners
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.unit_costs import Traffic

_Owned = tuple[list[int], Owner, int]
"""A matrix in the exchange of its unit: sizes of its parts, owner, bytes an element."""


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """The owner of each matrix in ``map_on_owners``, and the bytes of a call."""

    owners: dict[str, Owner]
    """By name of the matrix, from the model: the replica and the rank of the shard
    group."""
    _exchanges: tuple[tuple[int, tuple[_Owned, ...]], ...]
    """Per unit and dtype the number of replicas, and the matrices."""

    def traffic(self, rank: int, *, replica: int = 0) -> Traffic:
        """Return what a rank of a shard group sends in a call.

        Two all-to-alls per unit and dtype of which a matrix is cut, with the bytes that
        stay; with hybrid sharding a broadcast of results per replica and unit.
        """
        calls = sent = broadcasts = results = 0
        for replicas, owned in self._exchanges:
            here = [each for each in owned if each[1][0] == replica]
            # A matrix that its owner holds whole needs no message.
            if any(max(sizes) < sum(sizes) for sizes, _, _ in here):
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
        return Traffic(
            all_to_all_calls=calls,
            all_to_all_bytes=sent,
            broadcast_calls=broadcasts,
            broadcast_bytes=results,
        )

    @property
    def most(self) -> Traffic:
        """The traffic of the rank with most bytes."""
        ranks = max((len(o[0][0]) for _, o in self._exchanges), default=0)
        found = [
            self.traffic(rank, replica=replica)
            for rank in range(ranks)
            for replica in range(max(n for n, _ in self._exchanges))
        ]
        return max(
            found,
            key=lambda each: each.all_to_all_bytes + each.broadcast_bytes,
            default=Traffic(),
        )


def plan_owners(
    units: Iterable[UnitPlan],
    names: Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> OwnerPlan:
    """Return the owners of matrices, and the bytes of a call of ``map_on_owners``."""
    chosen = {
        join_name(unit.fqn, slot.fqn): (index, unit, region, slot)
        for index, unit in enumerate(units)
        for slot, region in unit.slots
    }
    if names is None:
        names = [
            name
            for name, (_, _, region, slot) in chosen.items()
            if region.trainable and len(slot.shape) == 2
        ]
    matrices = []
    for name in names:
        if name not in chosen:
            raise PlanError(
                "owners() expects names of parameters in units, got "
                f"{quoted(name)}. Pass names of model.named_parameters()."
            )
        matrices.append((name, chosen[name]))
    candidates = [
        Candidate(region, slot, unit.replicas, (unit.shard_world_size, unit.replicas))
        for _, (_, unit, region, slot) in matrices
    ]
    owners: dict[str, Owner] = {}
    exchanges: dict[tuple[int, torch.dtype, int], list[_Owned]] = {}
    for (name, (index, unit, region, _)), matrix, owner in zip(
        matrices, candidates, choose_owners(candidates), strict=True
    ):
        owners[name] = owner
        own = exchanges.setdefault((index, region.dtype, unit.replicas), [])
        own.append((matrix.sizes(), owner, (dtype or region.dtype).itemsize))
    return OwnerPlan(
        owners,
        tuple((key[2], tuple(owned)) for key, owned in exchanges.items()),
    )
