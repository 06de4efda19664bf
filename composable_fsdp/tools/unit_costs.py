"""What a unit costs in a step: its collectives, and the bytes of its buffers."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import NamedTuple

from composable_fsdp.planning.options import RETIRING_LIMIT, RETIRING_UNLIMITED
from composable_fsdp.planning.unit_plan import UnitPlan

ALIGNMENT = 256
"""Regions begin at multiples of this number of bytes, which suits every dtype and the
copy engines of GPUs."""


class Traffic(NamedTuple):
    """Collectives and their bytes of a training step, per rank.

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

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        """Return the sum by field, where a tuple would be appended."""
        return Traffic(*map(add, self, other))

    def by_op(self) -> dict[str, dict[str, int]]:
        """Return "calls" and "bytes" by kind of collective."""
        return {
            name.removesuffix("_calls"): {"calls": calls, "bytes": nbytes}
            for name, calls, nbytes in zip(
                self._fields[::2], self[::2], self[1::2], strict=True
            )
        }


class UnitMemory:
    """Bytes of a unit's buffers, and the facts that determine their lifetimes."""

    # ``parent`` is the index of the enclosing unit, -1 for the root; gradients flow
    # through a unit ``in_backward``; inputs of a unit that is ``fed`` need gradients;
    # shards ``on_host`` are in memory which is not the device's.
    def __init__(
        self, unit: UnitPlan, parent: int, in_backward: bool, fed: bool, on_host: bool
    ) -> None:
        self.plan, self.parent = unit, parent
        self.in_backward, self.fed = in_backward, fed
        options = unit.options
        self.arena = options.arena
        self.reshards = unit.reshards and parent >= 0
        self.full = unit.full_bytes
        self.wire = sum(r.wire_nbytes for r in unit.regions)
        # Whether unsharding needs an all-gather.
        self.gathers = unit.shard_world_size > 1 and unit.full_bytes > 0
        # Temporaries of the encoding, or of a cast of offloaded shards. Regions are
        # encoded, or copied and cast, in turn; the device casts what was copied.
        self.scratch = max(
            (
                (r.wire.scratch_nbytes(r.wire_layout, r.dtype) if r.wire else 0)
                + on_host * r.shard_numel * r.dtype.itemsize
                for r, d in unit.with_dtypes
                if r.wire or d.compute != r.dtype
            ),
            default=0,
        )
        # Reduce buffers; the output, if it is not the sharded gradient itself; and
        # temporaries of a hook, or of a cast before a copy to the host.
        self.buffers = unit.reduce_bytes
        self.output, self.brief = _output(unit), _brief(unit, on_host=on_host)
        # Sharded gradients that stay until ``zero_grad``; offloaded ones have host
        # memory of their own permanently.
        self.kept = 0 if unit.is_offloaded else unit.gradient_bytes
        self.sends = unit.shard_world_size * unit.replicas > 1
        self.replicates = unit.gradient_ranks > 1 and unit.sum_ranks > 1
        gradients = {
            slot.index: slot.numel * d.compute.itemsize
            for r, d in unit.reduced
            for slot in r.parameters
        }
        self.gradients = sum(gradients.values())
        # Gradients that autograd makes before any of a nested unit: that of the
        # parameter which forward uses first, the first of the unit, comes last. That of
        # a tied parameter is summed from the last use in forward on.
        last = min(gradients, default=0)
        tied = {s.index for r in unit.regions for s in r.parameters if s.fqns[1:]}
        self.early = self.gradients - (0 if last in tied else gradients.get(last, 0))
        # Resharded units whose memory may wait for the GPU.
        limited = options.limit_all_gathers
        self.retiring_limit = RETIRING_LIMIT if limited else RETIRING_UNLIMITED
        # Bytes of the slot of an arena.
        self.slot = slot_bytes(unit.full_regions)


def gathered_bytes(unit: UnitPlan) -> int:
    """Return the bytes that the all-gathers of an unsharding fill."""
    # The compute dtype, to which shards are cast before, or those of a wire format.
    return sum(
        r.wire_nbytes or r.padded_numel * d.compute.itemsize
        for r, d in unit.with_dtypes
        if r.numel
    )


def traffic_of(unit: UnitPlan, *, is_root: bool, in_backward: bool) -> Traffic:
    """Return the collectives of a forward and a backward in the steady state."""
    gathered = gathered_bytes(unit)
    # Regions with equal reduce dtype share a reduce-scatter and an all-reduce.
    dtypes = len({d.reduce for _, d in unit.reduced})
    nbytes = unit.reduce_bytes
    total = Traffic()
    if unit.shard_world_size > 1 and gathered:
        # A resharded unit is gathered a second time in backward. The root stays
        # unsharded between forward and backward.
        again = unit.reshards and not is_root and in_backward
        times = 1 + again
        total += Traffic(times, gathered * times)
        # Pieces at rest are filled once, with the values of the optimizer's step.
        if unit.has_rest:
            total += Traffic(1, gathered // unit.piece_ranks)
    if unit.gradient_ranks > 1 and gathered:
        total += Traffic(reduce_scatter_calls=dtypes, reduce_scatter_bytes=nbytes)
    if unit.sum_ranks > 1:
        # The all-reduce follows the reduce-scatter, on this rank's part.
        part = nbytes // unit.gradient_ranks
        total += Traffic(all_reduce_calls=dtypes, all_reduce_bytes=part)
    return total


def _output(unit: UnitPlan) -> int:
    """Return the bytes of the output of a reduction, before a cast or a copy."""
    # With equal dtypes and without offload, the reduction writes into the sharded
    # gradient itself, unless the output is more than that.
    is_more = unit.gradient_ranks < unit.shard_world_size
    others = is_more or unit.is_offloaded
    return sum(
        r.padded_numel // unit.gradient_ranks * d.reduce.itemsize
        for r, d in unit.reduced
        if d.reduce != d.gradient or others
    )


def _brief(unit: UnitPlan, *, on_host: bool) -> int:
    """Return the bytes of temporaries of a reduction."""
    # Before a gradient is copied to the host, the device casts. Regions are copied in
    # turn.
    casts = [(r, d) for r, d in unit.reduced if d.reduce != d.gradient]
    landing = [on_host * r.shard_numel * d.gradient.itemsize for r, d in casts]
    return max(landing, default=0)


def slot_bytes(regions: Iterable[int]) -> int:
    """Return the bytes of a slot for regions of the given bytes, one after another."""
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in regions)
