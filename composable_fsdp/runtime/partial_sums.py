"""Sums of gradients over the ranks that do not divide them: the sum group (``Groups``).

::

    reduce buffer (padded_numel,) -reduce-scatter-> target (shard_numel,)
        + sums of earlier reductions -all-reduce over the sum group-> target
"""

from __future__ import annotations

from collections.abc import Sequence

from composable_fsdp.comm import collectives
from composable_fsdp.comm.operations import Operation
from composable_fsdp.flat.gradients import reduce_target
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.tree.state import Reduction


def add_partial_sums(region: TrainableRegion) -> None:
    """Add sums of earlier reductions that were not yet all-reduced."""
    if region.reduce.partial is not None:
        reduce_target(region).add_(region.reduce.partial)
        region.reduce.partial = None


def all_reduce_sums(handle: FlatParamHandle) -> None:
    """All-reduce the regions over the sum group, after the reduce-scatters."""
    for regions in handle.layout.reduce_groups:
        issue_all_reduce(handle, regions, async_op=False)


def issue_all_reduce(
    handle: FlatParamHandle, regions: Sequence[TrainableRegion], *, async_op: bool
) -> Operation | None:
    """Issue the all-reduce of regions with the same reduce dtype over the sum group."""
    ref = handle.groups.sum_ref
    if ref is None:
        return None
    for region in regions:
        add_partial_sums(region)
    targets = [reduce_target(region) for region in regions]
    return collectives.all_reduce(
        targets,
        ref.get(),
        average=regions[0].reduce.division.by_backend,
        async_op=async_op,
        operation=Operation(ref, "all_reduce", handle.full_fqn, handle.phase, targets),
    )


def hold_partial_sums(reduction: Reduction) -> None:
    """Keep sums of reduce-scatters until their all-reduce is due."""
    handle = reduction.handle
    handle.reduction.held = reduction.arrived
    for region in handle.layout.trainable:
        reduce = region.reduce
        sums, reduce.temporary = reduce.temporary, None
        if reduce.partial is not None and sums is not None:
            reduce.partial.add_(sums)
        else:
            reduce.partial = sums


def drop_partial_sums(handle: FlatParamHandle) -> None:
    """Discard sums that wait for the all-reduce over the replicas."""
    handle.reduction.held = None
    for region in handle.layout.trainable:
        region.reduce.partial = None
