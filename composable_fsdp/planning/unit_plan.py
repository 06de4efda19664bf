"""``UnitPlan``: a unit as integers and names, with its memory and its traffic."""

from __future__ import annotations

from dataclasses import dataclass

from composable_fsdp.comm.int8_exchange import Int8Exchange, int8_exchange
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.memory import (
    RETIRING_LIMIT,
    RETIRING_UNLIMITED,
    ReductionMemory,
    UnitMemory,
)
from composable_fsdp.planning.options import Dtypes, UnitOptions
from composable_fsdp.planning.slots import slot_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of a training step and their bytes, per rank.

    Regions whose collectives are issued together count as a single call. Bytes are
    those of the whole buffer that a collective fills or reduces (``padded_numel`` x
    item size). On a ring, a rank sends and receives ``(world_size - 1) / world_size``
    of these bytes; for an all-reduce, twice that.
    """

    all_gather_calls: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_calls: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_calls: int = 0
    all_reduce_bytes: int = 0
    all_to_all_calls: int = 0
    all_to_all_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_gather_calls + other.all_gather_calls,
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_calls + other.reduce_scatter_calls,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_calls + other.all_reduce_calls,
            self.all_reduce_bytes + other.all_reduce_bytes,
            self.all_to_all_calls + other.all_to_all_calls,
            self.all_to_all_bytes + other.all_to_all_bytes,
        )


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit: its name, its regions and its options.

    Args:
        fqn: name of the unit's module, from the module that was planned.
        class_name: name of the module's class.
        regions: the flat buffers of the unit.
        options: the options of the unit.
        shard_world_size: number of ranks in the shard group.
        replicas: number of ranks in the replicate group.
        int8_gradients: whether ``int8_all_to_all_hook`` reduces gradients. Default
            False.
    """

    fqn: str
    class_name: str
    regions: tuple[RegionLayout, ...]
    options: UnitOptions
    shard_world_size: int
    replicas: int
    int8_gradients: bool = False

    @property
    def parameter_bytes(self) -> int:
        """Bytes of sharded parameters per rank, padding included."""
        return sum(r.shard_numel * r.dtype.itemsize for r in self.regions)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of sharded gradients per rank, padding included."""
        return sum(r.shard_numel * d.gradient.itemsize for r, d in self._reduced)

    @property
    def is_offloaded(self) -> bool:
        """Whether sharded parameters and sharded gradients live in host memory."""
        offload = self.options.cpu_offload
        return offload is not None and offload.offload_params

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters of the unsharded unit, in the compute dtype.

        A region needs no full buffer if the shard group has one rank, the shard has the
        compute dtype and the memory format of compute, and the shard is on the device.
        """
        return sum(self._full_regions)

    @property
    def _full_regions(self) -> list[int]:
        """Bytes of each full buffer."""
        return [
            r.padded_numel * d.compute.itemsize
            for r, d in self._with_dtypes
            if self.shard_world_size > 1
            or d.compute != r.dtype
            or self.is_offloaded
            or r.wire
            or r.is_strided
        ]

    @property
    def wire_bytes(self) -> int:
        """Bytes of the encoded parameters of all ranks, which one all-gather fills."""
        return sum(r.wire_nbytes for r in self.regions)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the reduce buffers, which receive the unit's gradients."""
        return sum(r.padded_numel * d.reduce.itemsize for r, d in self._reduced)

    @property
    def _with_dtypes(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        """Pairs of a region and its dtypes."""
        return tuple([(r, self.options.dtypes(r.dtype)) for r in self.regions])

    @property
    def _reduced(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        """Pairs of a region whose gradients are reduced and its dtypes."""
        return tuple([(r, d) for r, d in self._with_dtypes if r.trainable and r.numel])

    @property
    def _exchanges(self) -> list[Int8Exchange]:
        """The exchanges of ``int8_all_to_all_hook``, one per region."""
        # The hook's group is the shard group, or that of all ranks with whole weights.
        ranks = self.shard_world_size if self.shard_world_size > 1 else self.replicas
        return [
            int8_exchange(r.padded_numel, ranks, d.reduce.itemsize)
            for r, d in self._reduced
            if self.int8_gradients
        ]

    @property
    def trainable(self) -> dict[str, int]:
        """Elements of each trainable parameter, by name from the unit's module."""
        return self._numels(trainable=True)

    @property
    def frozen(self) -> dict[str, int]:
        """Elements of each frozen parameter, by name from the unit's module."""
        return self._numels(trainable=False)

    def _numels(self, *, trainable: bool) -> dict[str, int]:
        """Return elements per parameter, in the order of the unit's parameters."""
        slots = [
            s for r in self.regions if r.trainable is trainable for s in r.parameters
        ]
        return {s.fqn: s.numel for s in sorted(slots, key=lambda slot: slot.index)}

    @property
    def is_trainable(self) -> bool:
        """Whether the unit has a trainable parameter with at least one element."""
        return any(r.trainable and r.numel for r in self.regions)

    def traffic(self, *, is_root: bool, in_backward: bool) -> Traffic:
        """Return the collectives of a forward and a backward in the steady state.

        ``is_root`` tells whether the unit is the root, ``in_backward`` whether
        gradients flow through the unit.
        """
        # The all-gather sends the compute dtype, to which shards are cast before, or
        # the bytes of a wire format.
        gathered = sum(
            r.wire_nbytes or r.padded_numel * d.compute.itemsize
            for r, d in self._with_dtypes
            if r.numel
        )
        # Formats with a scale per matrix ask all ranks for the largest magnitude.
        scaled = [
            len(r.parameters) for r in self.regions if r.wire and r.wire.needs_maximum
        ]
        # Regions with equal reduce dtype share a reduce-scatter and an all-reduce.
        dtypes = len({d.reduce for _, d in self._reduced})
        nbytes = self.reduce_bytes
        total = Traffic()
        if self.shard_world_size > 1 and gathered:
            # A resharded unit is gathered a second time in backward. The root stays
            # unsharded between forward and backward.
            again = self.options.reshard_after_forward and not is_root and in_backward
            total += Traffic(1 + again, gathered * (1 + again))
            if not self.int8_gradients:
                total += Traffic(
                    reduce_scatter_calls=dtypes, reduce_scatter_bytes=nbytes
                )
            # A float32 per matrix, before each all-gather.
            times = 1 + again
            total += Traffic(
                all_reduce_calls=len(scaled) * times,
                all_reduce_bytes=4 * sum(scaled) * times,
            )
        for each in self._exchanges:
            total += Traffic(all_to_all_calls=1, all_to_all_bytes=each.sent)
            # Ranks that hold whole gradients exchange the averages, too.
            if self.shard_world_size == 1:
                total += Traffic(1, each.gathered)
        if self.replicas > 1 and not self.int8_gradients:
            # In a hybrid mesh the all-reduce follows the reduce-scatter, on this rank's
            # part.
            part = nbytes // self.shard_world_size
            total += Traffic(all_reduce_calls=dtypes, all_reduce_bytes=part)
        return total

    def memory(
        self, *, parent: int, in_backward: bool, fed: bool, on_host: bool
    ) -> UnitMemory:
        """Return the bytes of this unit's buffers, as the input of ``memory_of_step``.

        Returns: the bytes by kind, and the facts that determine the lifetimes.
        """
        gradients = {
            slot.index: slot.numel * d.compute.itemsize
            for r, d in self._reduced
            for slot in r.parameters
        }
        total = sum(gradients.values())
        # The parameter that comes first in the unit counts as the first used in
        # forward.
        last = min(gradients, default=0)
        # A parameter with several names is tied.
        tied = {s.index for r in self.regions for s in r.parameters if s.fqns[1:]}
        options = self.options
        limited = options.limit_all_gathers
        return UnitMemory(
            name=self.fqn or ROOT_NAME,
            parent=parent,
            full=self.full_bytes,
            wire=self.wire_bytes,
            # Regions are encoded, or copied and cast, in turn. The device casts, so an
            # offloaded shard is copied first.
            scratch=max(
                (
                    r.wire_scratch + on_host * r.shard_numel * r.dtype.itemsize
                    for r, d in self._with_dtypes
                    if r.wire or d.compute != r.dtype or r.is_strided
                ),
                default=0,
            ),
            reduction=self._reduction(on_host=on_host),
            gradients=total,
            # Backward produces the gradient of the parameter that forward uses first as
            # the last. The gradient of a tied parameter is summed from the last use in
            # forward on, so the memory exists from the start of the unit's backward.
            early=total - (0 if last in tied else gradients.get(last, 0)),
            in_backward=in_backward,
            fed=fed,
            reshards=options.reshard_after_forward and parent >= 0,
            prefetch=options.backward_prefetch,
            gathers=self.shard_world_size > 1 and self.full_bytes > 0,
            ahead=options.forward_prefetch,
            retiring_limit=RETIRING_LIMIT if limited else RETIRING_UNLIMITED,
            slots=(
                slot_bytes(self._full_regions),
                slot_bytes(
                    [r.padded_numel * d.reduce.itemsize for r, d in self._reduced]
                ),
            ),
            arena=options.arena,
        )

    def _reduction(self, *, on_host: bool) -> ReductionMemory:
        """Return the bytes of the buffers of this unit's reduction."""
        casts = [(r, d) for r, d in self._reduced if d.reduce != d.gradient]
        # Before a gradient is copied to the host, the device casts.
        landing = [on_host * r.shard_numel * d.gradient.itemsize for r, d in casts]
        # Regions are exchanged, or copied, in turn.
        brief = [*landing, *(each.scratch for each in self._exchanges)]
        return ReductionMemory(
            buffers=self.reduce_bytes,
            # With equal dtypes and without offload, the reduction writes into the
            # sharded gradient itself. Otherwise a temporary buffer receives the output,
            # before the cast or the copy to the host.
            output=sum(
                r.shard_numel * d.reduce.itemsize
                for r, d in self._reduced
                if d.reduce != d.gradient or self.is_offloaded or self.int8_gradients
            ),
            brief=max(brief, default=0),
            # Offloaded gradients have host memory of their own permanently.
            kept=0 if self.is_offloaded else self.gradient_bytes,
            sends=self.shard_world_size * self.replicas > 1,
            replicates=self.shard_world_size > 1 and self.replicas > 1,
        )


def padding_notes(unit: UnitPlan) -> list[str]:
    """Return sentences on regions that are mostly padding because of row blocks."""
    notes = []
    for region in unit.regions:
        # Up to twice the size, padding is not worth a sentence.
        if region.padded_numel <= 2 * region.numel or not region.numel:
            continue
        # A parameter with fewer rows than ranks leaves whole shards empty.
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
