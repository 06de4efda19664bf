"""Agreement at the end of ``unshard_params``: all ranks of a unit write back, or none.

::

    rank raises in its block    report_failure   sends a flag, does not wait
    rank reaches the end        failed_ranks     waits for the flags of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import full_views
from composable_fsdp.naming import join_name, quoted


def report_failure(handles: Sequence[FlatParamHandle]) -> None:
    """Tell the other ranks of these units that this rank raised.

    Collective: as ``failed_ranks``, but asynchronous: the call returns before the other
        ranks have entered.
    """
    for groups in _distinct_groups(handles):
        for group in groups:
            # async_op, so that this rank's exception is raised at once, whatever the
            # others do.
            collectives.all_reduce(
                _mine(handles, failed=True), group, maximum=True, async_op=True
            )


def failed_ranks(handles: Sequence[FlatParamHandle]) -> list[int | None]:
    """Return per unit a global rank of the unit that raised; ``None`` if none raised.

    Collective: an all-reduce of an integer over each distinct shard group, and over the
        replicate group.
    """
    known: dict[tuple[dist.ProcessGroup, ...], int] = {}
    for groups in _distinct_groups(handles):
        worst = _mine(handles, failed=False)
        for group in groups:
            collectives.all_reduce(worst, group, maximum=True)
        # item() waits for the slowest rank of the groups.
        known[groups] = int(worst.item())
    # The numbers are ranks + 1, so that 0 means that no rank raised.
    found = [known.get(_groups(handle), 0) for handle in handles]
    return [number - 1 if number else None for number in found]


def _mine(handles: Sequence[FlatParamHandle], *, failed: bool) -> Tensor:
    """Return this rank's flag: global rank + 1 if this rank raised, else 0."""
    number = dist.get_rank() + 1 if failed else 0
    return torch.tensor([number], dtype=torch.int32, device=handles[0].device)


def _groups(handle: FlatParamHandle) -> tuple[dist.ProcessGroup, ...]:
    """Return the shard group and the replicate group of a unit, if they exist."""
    both = (handle.groups.shard, handle.groups.replicate)
    return tuple(group for group in both if group is not None)


def _distinct_groups(
    handles: Sequence[FlatParamHandle],
) -> list[tuple[dist.ProcessGroup, ...]]:
    """Return the distinct group tuples in the order of the units."""
    found = dict.fromkeys(map(_groups, handles))
    return [groups for groups in found if groups]


@torch.no_grad()
def require_same_values(handle: FlatParamHandle, fulls: Sequence[Tensor]) -> None:
    """Refuse full values ``(padded_numel,)`` that differ between the unit's ranks.

    Collective: a single all-reduce with four numbers per parameter over the shard group
        and over the replicate group.
    Raises: DesyncError with the parameter's name, on all ranks alike.
    """
    names, prints = [], []
    for region, full in zip(handle.regions, fulls, strict=True):
        pieces, _ = full_views(region.layout, full)
        for slot, piece in zip(region.layout.parameters, pieces, strict=True):
            names.append(join_name(handle.full_fqn, slot.fqn))
            prints.append(_fingerprint(piece))
    if not prints:
        return
    mine = torch.stack(prints).to(handle.device)
    # A single maximum gives the maximum and, negated, the minimum; equal ends mean
    # equal values on all ranks.
    ends = torch.cat([mine, -mine])
    for group in _groups(handle):
        collectives.all_reduce(ends, group, maximum=True)
    largest, smallest = ends[: len(names)], -ends[len(names) :]
    unlike = (largest != smallest).any(1).tolist()
    if any(unlike):
        count = sum(unlike)
        more = f" and {count - 1} more of its unit" if count > 1 else ""
        raise DesyncError(
            f"Parameter {quoted(names[unlike.index(True)])}{more} was written "
            "differently on the ranks inside unshard_params, where each rank keeps the "
            "part that it holds; nothing was written. Write the same on every rank, or "
            "pass rank0_only=True to give all of them rank 0's values."
        )


def _fingerprint(values: Tensor) -> Tensor:
    """Return two integers ``(2,)`` that depend on every bit and on the order."""
    flat = values.reshape(-1)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size())
    bits = flat.view(whole or torch.int64).to(torch.int64)
    # Odd weights: no single difference is lost when the sum overflows.
    weights = torch.arange(bits.numel(), device=bits.device) * 2 + 1
    return torch.stack([bits.sum(), (bits * weights).sum()])
