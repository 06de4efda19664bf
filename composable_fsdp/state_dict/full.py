"""Gather the full parameters of a unit."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.access.gather import gather_flat_values
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime.offload import on_device


@torch.no_grad()
def gather_unit(
    handle: FlatParamHandle, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return the unit's full parameters by slot index, in the shards' dtype.

    The tensors are new and have the plain model's shapes. Additional memory: the full
    buffers of a single unit.

    Args:
        handle: The unit.
        first_only: Gather on the first rank of the first replica only; the other ranks
            get an empty dict. Default False.
        to_cpu: Return tensors in host memory. Default False.

    Returns: the tensors by slot index; on meta if the unit has no values yet.
    Collective: as ``gather_flat_values``; with ``first_only`` only in the first
        replica; none if the unit is on meta. Of parameters that tensor parallelism
        cuts, an all-gather each over its ranks.
    """
    # As in plain torch, the state dict of a model on meta has keys, shapes and dtypes.
    if handle.layout.on_meta:
        return {
            slot.index: torch.empty(
                slot.shape if slot.whole is None else slot.whole.shape,
                dtype=region.layout.dtype,
                device="meta",
            )
            for region in handle.layout.regions
            for slot in region.layout.parameters
        }
    # All replicas hold equal values, so a single replica gathers.
    if first_only and not handle.groups.in_first_replica:
        return {}
    # Offloaded shards are copied to the compute device, from which the backend sends.
    shards = [on_device(handle, region.shard) for region in handle.layout.regions]
    fulls = gather_flat_values(handle, shards, first_only=first_only)
    if not fulls:
        return {}
    if handle.layout.forms:
        return _whole_values(handle, fulls, to_cpu)
    return {
        # Copied, so that the caller's tensors do not keep the full buffer alive.
        slot.index: _copy(
            full[slot.offset : slot.offset + slot.numel].view(slot.shape),
            to_cpu,
            slot.strides,
        )
        for region, full in zip(handle.layout.regions, fulls, strict=True)
        for slot in region.layout.parameters
    }


def _whole_values(
    handle: FlatParamHandle, fulls: list[Tensor], to_cpu: bool
) -> dict[int, Tensor]:
    """Return the values by slot index, of which tensor parallelism cuts some.

    Collective: per parameter that is cut an all-gather over the ranks that cut it.
    """
    own = {
        slot.index: full[slot.offset : slot.offset + slot.numel].view(slot.shape)
        for region, full in zip(handle.layout.regions, fulls, strict=True)
        for slot in region.layout.parameters
    }
    made: dict[int, Tensor] = {}
    # By index: the ranks that cut may have other regions, and must send alike.
    for index in sorted(own):
        form = handle.layout.forms.get(index)
        value = own[index] if form is None else form.whole(own[index])
        made[index] = _copy(value, to_cpu)
    return made


def _copy(
    value: Tensor, to_cpu: bool, strides: tuple[int, ...] | None = None
) -> Tensor:
    """Return an own copy of ``value``, in host memory if ``to_cpu``."""
    if strides:
        # Values of the plain model have its memory format.
        made = value.new_empty_strided(value.shape, strides)
        value = made.copy_(value)
        return value.cpu() if to_cpu else value
    return value.to("cpu", copy=True) if to_cpu else value.clone()
