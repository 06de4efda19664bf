"""How a block of ``unshard_params`` ends: written on all ranks of a unit, or on none.

A rank that raises in its block tells the others, which wait for that before they write.
It does not wait itself: its error is out at once, whatever the others do.
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
    """Let the other ranks of these units know that this one raised.

    Collective: as ``failed_ranks``; returns before the others have come.
    """
    for groups in _distinct_groups(handles):
        for group in groups:
            collectives.all_reduce(
                _mine(handles, failed=True), group, maximum=True, async_op=True
            )


def failed_ranks(handles: Sequence[FlatParamHandle]) -> list[int | None]:
    """Per unit, a global rank that raised among those that hold it; ``None`` if none.

    Collective: one all-reduce of a number over each distinct shard group, and one over
    its replicate group.
    """
    known: dict[tuple[dist.ProcessGroup, ...], int] = {}
    for groups in _distinct_groups(handles):
        worst = _mine(handles, failed=False)
        for group in groups:
            collectives.all_reduce(worst, group, maximum=True)
        known[groups] = int(worst.item())
    found = [known.get(_groups(handle), 0) for handle in handles]
    return [number - 1 if number else None for number in found]


def _mine(handles: Sequence[FlatParamHandle], *, failed: bool) -> Tensor:
    number = dist.get_rank() + 1 if failed else 0
    return torch.tensor([number], dtype=torch.int32, device=handles[0].device)


def _groups(handle: FlatParamHandle) -> tuple[dist.ProcessGroup, ...]:
    both = (handle.groups.shard, handle.groups.replicate)
    return tuple(group for group in both if group is not None)


def _distinct_groups(
    handles: Sequence[FlatParamHandle],
) -> list[tuple[dist.ProcessGroup, ...]]:
    """In the order of the units, which is the same on all ranks."""
    found = dict.fromkeys(map(_groups, handles))
    return [groups for groups in found if groups]


@torch.no_grad()
def require_same_values(handle: FlatParamHandle, fulls: Sequence[Tensor]) -> None:
    """Refuse full values ``(padded_numel,)`` that differ over the unit's ranks.

    Collective: one all-reduce of four numbers per parameter over the shard group and
    one over the replicas.
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
    """Two numbers ``(2,)`` that change with any bit of ``values`` or their order."""
    flat = values.reshape(-1)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size())
    bits = flat.view(whole or torch.int64).to(torch.int64)
    # Odd factors: no single difference can be lost when the sum overflows.
    weights = torch.arange(bits.numel(), device=bits.device) * 2 + 1
    return torch.stack([bits.sum(), (bits * weights).sum()])
