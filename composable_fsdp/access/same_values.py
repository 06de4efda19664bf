"""Compare full values over ranks, before values are written into shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError
from composable_fsdp.flat.build_region import full_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import quoted


@torch.no_grad()
def require_same_values(handle: FlatParamHandle, fulls: Sequence[Tensor]) -> None:
    """Refuse full values ``(padded_numel,)`` that differ between the unit's ranks.

    Collective: a single all-reduce with two numbers per parameter over the shard group
        and over the replicate group.
    Raises: DesyncError with the parameter's name, on all ranks alike.
    """
    names: list[str] = []
    whole: list[Tensor] = []
    for region, full in zip(handle.layout.regions, fulls, strict=True):
        pieces, _ = full_views(region.layout, full)
        for slot, piece in zip(region.layout.parameters, pieces, strict=True):
            names.append(slot_path(handle, slot))
            whole.append(piece)
    if not whole:
        return
    mine = hash_values(whole).to(handle.layout.device)
    # A single maximum gives the maximum and, of the inverted bits, the minimum; equal
    # ends mean equal values on all ranks. The negative would overflow.
    ends = torch.cat([mine, ~mine])
    for group in handle.groups.present:
        collectives.all_reduce(ends, group, maximum=True)
    largest, smallest = ends[: len(names)], ~ends[len(names) :]
    unlike = (largest != smallest).tolist()
    if any(unlike):
        count = sum(unlike)
        more = f" and {count - 1} more of its unit" if count > 1 else ""
        raise DesyncError(
            f"Parameter {quoted(names[unlike.index(True)])}{more} was written "
            "differently on the ranks inside unshard_params, where each rank keeps the "
            "part that it holds; nothing was written. Write the same on every rank, or "
            "pass rank0_only=True to give all of them rank 0's values."
        )
