"""``UnitPlan``: one fully sharded module in integers and names, and its costs."""

from __future__ import annotations

from dataclasses import dataclass

from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.memory import (
    RETIRING_LIMIT,
    RETIRING_UNLIMITED,
    UnitMemory,
)
from composable_fsdp.planning.options import Dtypes, UnitOptions


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one training step and their bytes, per rank.

    Regions issued together are one call. Bytes are those of the whole buffer that a
    collective fills or reduces (``padded_numel`` x item size): what a rank sends and
    receives on a ring is that times ``(world_size - 1) / world_size``, twice for an
    all-reduce.
    """

    all_gather_calls: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_calls: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_calls: int = 0
    all_reduce_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_gather_calls + other.all_gather_calls,
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_calls + other.reduce_scatter_calls,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_calls + other.all_reduce_calls,
            self.all_reduce_bytes + other.all_reduce_bytes,
        )


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One fully sharded module: its name, its regions and its options.

    ``fqn`` is the module's name from the module that was planned. ``shard_world_size``
    is the number of ranks that share the parameters, ``replicas`` the number of such
    groups.
    """

    fqn: str
    class_name: str
    regions: tuple[RegionLayout, ...]
    options: UnitOptions
    shard_world_size: int
    replicas: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that each rank keeps (its shards, padding included)."""
        return sum(r.shard_numel * r.dtype.itemsize for r in self.regions)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of reduced gradients that each rank keeps."""
        return sum(r.shard_numel * d.gradient.itemsize for r, d in self._reduced)

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters and reduced gradients are kept in host memory."""
        offload = self.options.cpu_offload
        return offload is not None and offload.offload_params

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's full parameters while it is unsharded.

        In the compute dtype; none where the parameters are computed with as they lie.
        """
        return sum(
            r.padded_numel * d.compute.itemsize
            for r, d in self._with_dtypes
            if self.shard_world_size > 1 or d.compute != r.dtype or self.is_offloaded
        )

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the buffers that the unit's gradients arrive in."""
        return sum(r.padded_numel * d.reduce.itemsize for r, d in self._reduced)

    @property
    def _with_dtypes(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        return tuple([(r, self.options.dtypes(r.dtype)) for r in self.regions])

    @property
    def _reduced(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        return tuple([(r, d) for r, d in self._with_dtypes if r.trainable and r.numel])

    @property
    def trainable(self) -> dict[str, int]:
        """Elements of each parameter that gets a gradient, by name from the unit."""
        return self._numels(trainable=True)

    @property
    def frozen(self) -> dict[str, int]:
        """Elements of each parameter that gets none, by name from the unit."""
        return self._numels(trainable=False)

    def _numels(self, *, trainable: bool) -> dict[str, int]:
        slots = [
            s for r in self.regions if r.trainable is trainable for s in r.parameters
        ]
        return {s.fqn: s.numel for s in sorted(slots, key=lambda slot: slot.index)}

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the unit gets a gradient."""
        return any(r.trainable and r.numel for r in self.regions)

    def traffic(self, *, is_root: bool, in_backward: bool) -> Traffic:
        """Collectives of one forward and backward in the steady state.

        ``in_backward`` tells whether gradients flow through the unit.
        """
        gathered = sum(
            r.padded_numel * d.compute.itemsize for r, d in self._with_dtypes if r.numel
        )
        dtypes = len({d.reduce for _, d in self._reduced})
        nbytes = self.reduce_bytes
        total = Traffic()
        if self.shard_world_size > 1 and gathered:
            again = self.options.reshard_after_forward and not is_root and in_backward
            total += Traffic(1 + again, gathered * (1 + again), dtypes, nbytes)
        if self.replicas > 1:
            part = nbytes // self.shard_world_size
            total += Traffic(all_reduce_calls=len(self._reduced), all_reduce_bytes=part)
        return total

    def memory(
        self, *, parent: int, in_backward: bool, fed: bool, on_host: bool
    ) -> UnitMemory:
        """The bytes of this unit's buffers, for ``peak_of_step``.

        ``parent`` is the index of the unit around it (-1 for the root), ``fed`` tells
        whether its inputs need gradients, ``on_host`` whether its shards are elsewhere
        than its full parameters.
        """
        gradients = {
            slot.index: slot.numel * d.compute.itemsize
            for r, d in self._reduced
            for slot in r.parameters
        }
        total = sum(gradients.values())
        last = min(gradients, default=0)
        tied = {s.index for r in self.regions for s in r.parameters if s.fqns[1:]}
        options = self.options
        limited = options.limit_all_gathers
        return UnitMemory(
            name=self.fqn or ROOT_NAME,
            parent=parent,
            full=self.full_bytes,
            reduce=self.reduce_bytes,
            temporary=sum(
                r.shard_numel * d.reduce.itemsize
                for r, d in self._reduced
                if d.reduce != d.gradient or on_host
            ),
            gradients=total,
            # The one used first comes last. A tied one is summed from the start.
            early=total - (0 if last in tied else gradients.get(last, 0)),
            # On the host they have memory of their own, for good.
            reduced=0 if self.is_offloaded else self.gradient_bytes,
            sends=self.shard_world_size * self.replicas > 1,
            in_backward=in_backward,
            fed=fed,
            reshards=options.reshard_after_forward and parent >= 0,
            prefetch=options.backward_prefetch,
            gathers=self.shard_world_size > 1 and self.full_bytes > 0,
            ahead=options.forward_prefetch,
            retiring_limit=RETIRING_LIMIT if limited else RETIRING_UNLIMITED,
        )


def padding_notes(unit: UnitPlan) -> list[str]:
    """Say where row blocks pad a region to more than twice its parameters."""
    notes = []
    for region in unit.regions:
        if region.padded_numel <= 2 * region.numel or not region.numel:
            continue
        few = [
            slot.fqn
            for slot in region.parameters
            if slot.block > 1 and slot.shape[0] < unit.shard_world_size
        ]
        if few:
            notes.append(
                f"unit {unit.fqn or ROOT_NAME}: {', '.join(few)} have fewer rows than "
                f"the {unit.shard_world_size} ranks, so padding is "
                f"{region.padded_numel / region.numel - 1:.0%}; block=Block.ELEMENT "
                "cuts inside rows and avoids it."
            )
    return notes
