"""``UnitPlan``: a unit as integers and names."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from composable_fsdp.comm.placements import Ways
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.options import Dtypes, UnitOptions


class Place(NamedTuple):
    """A place of a parameter, as names only: equal units share ``Place`` objects."""

    fqn: str
    """The parameter's name at this place, from the unit's module."""
    name: str
    slot_index: int
    """Index of the parameter in the unit, whose names need not be unique."""


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit: its name, its regions, its options, and the ``Ways`` it is divided."""

    fqn: str
    """The name of the unit's module, from the module that was planned."""
    class_name: str
    regions: tuple[RegionLayout, ...]
    options: UnitOptions
    shard_world_size: int
    replicas: int
    parameter_ranks: int
    between_ranks: int
    gradient_ranks: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of sharded parameters per rank, padding included."""
        return sum(r.shard_numel * r.dtype.itemsize for r in self.regions)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of sharded gradients per rank, padding included."""
        return sum(r.shard_numel * d.gradient.itemsize for r, d in self.reduced)

    @property
    def ways(self) -> Ways:
        """The numbers of ranks over which the unit divides."""
        return Ways(*attrgetter(*Ways._fields)(self))

    @property
    def stays_full(self) -> bool:
        """Whether full parameters stay from step to step, beside sharded states."""
        return self.parameter_ranks == 1 < self.shard_world_size

    @property
    def reshards(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        if self.shard_world_size > 1:
            return self.between_ranks > 1
        return self.options.reshard_after_forward

    @property
    def piece_ranks(self) -> int:
        """Number of pieces of the full parameters that are kept; 0 if none are."""
        rest, between = self.parameter_ranks, self.between_ranks
        if 1 < rest < self.shard_world_size:
            return rest
        return between if 1 < between < rest else 0

    @property
    def has_rest(self) -> bool:
        """Whether parameters at rest are pieces of several shards."""
        return 1 < self.parameter_ranks < self.shard_world_size

    @property
    def sum_ranks(self) -> int:
        """Number of ranks that add up their reduced gradients by an all-reduce."""
        return self.shard_world_size * self.replicas // self.gradient_ranks

    @property
    def piece_bytes(self) -> int:
        """Bytes of the pieces of the full parameters that a rank keeps, if any."""
        return self.full_bytes // self.piece_ranks if self.piece_ranks else 0

    @property
    def is_offloaded(self) -> bool:
        """Whether sharded parameters and sharded gradients live in host memory."""
        offload = self.options.cpu_offload
        return offload is not None and offload.offload_params

    @property
    def has_host_states(self) -> bool:
        """Whether the optimizer's states alone live in host memory."""
        offload = self.options.cpu_offload
        return offload is not None and offload.offload_states and not self.is_offloaded

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters of the unsharded unit, in the compute dtype."""
        return sum(self.full_regions)

    @property
    def full_regions(self) -> list[int]:
        """Bytes of each full buffer."""
        return [
            r.padded_numel * d.compute.itemsize
            for r, d in self.with_dtypes
            if self.shard_world_size > 1
            or d.compute != r.dtype
            or self.is_offloaded
            or r.wire
        ]

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the reduce buffers, which receive the unit's gradients."""
        return sum(r.padded_numel * d.reduce.itemsize for r, d in self.reduced)

    @property
    def slots(self) -> list[tuple[ParameterSlot, RegionLayout]]:
        """Pairs of a parameter and its region, in the order of the unit's walk."""
        found = [
            (slot, region) for region in self.regions for slot in region.parameters
        ]
        return sorted(found, key=lambda pair: pair[0].index)

    @property
    def with_dtypes(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        """Pairs of a region and its dtypes."""
        return tuple([(r, self.options.dtypes(r.dtype)) for r in self.regions])

    @property
    def reduced(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        """Pairs of a region whose gradients are reduced and its dtypes."""
        return tuple([(r, d) for r, d in self.with_dtypes if r.trainable and r.numel])

    @property
    def trainable(self) -> dict[str, int]:
        """Elements of each trainable parameter, by name from the unit's module."""
        return {s.fqn: s.numel for s, r in self.slots if r.trainable}

    @property
    def frozen(self) -> dict[str, int]:
        """Elements of each frozen parameter, by name from the unit's module."""
        return {s.fqn: s.numel for s, r in self.slots if not r.trainable}

    @property
    def is_trainable(self) -> bool:
        """Whether the unit has a trainable parameter with at least one element."""
        return any(r.trainable and r.numel for r in self.regions)
