"""This rank's parts of a unit's parameters, as sharded values."""

from __future__ import annotations

from math import prod

from torch import Tensor

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.state_dict.sharded import Home, ShardedValue, describe


def sharded_value(ref: ParamRef, local: Tensor) -> Tensor:
    """Return ``local``, this rank's part of a parameter, as a sharded value."""
    handle, region, slot = ref.handle, ref.region, ref.slot
    # No box could represent a parameter without elements.
    if not prod(ref.shape):
        return local.new_empty(ref.shape)
    if handle.groups.shard is None and not slot.shape:
        return local
    within = None
    # Of a parameter that tensor parallelism cuts, the rectangle here. Plain tuples,
    # which ``torch.load(weights_only=True)`` reads.
    if slot.whole is not None:
        cuts = prod(size for _, size, dim in slot.whole.axes if dim is not None)
        within = slot.shape, slot.whole.offset, cuts
    # Also without a shard group, so that DCP reads and writes boxes.
    return ShardedValue(
        local,
        ref.shape,
        slot.offset,
        region.layout.shard_numel,
        region.rank,
        region.layout.world_size,
        Home(handle.groups.shard_ref, handle.layout.device, ref.form),
        within,
    )


def sharded_values(handle: FlatParamHandle, *, to_cpu: bool) -> dict[int, Tensor]:
    """Return copies of this rank's part of the unit's parameters, by slot index."""
    return {
        ref.slot.index: sharded_value(
            ref, ref.leaf.detach().to("cpu" if to_cpu else ref.leaf.device, copy=True)
        )
        for ref in param_refs(handle)
    }


def mismatch(ref: ParamRef, value: ShardedValue) -> str:
    """Return why ``value`` is not this rank's part of ``ref``, or an empty text."""
    own = sharded_value(ref, value.local)
    if isinstance(own, ShardedValue) and own.is_part_like(value):
        return ""
    region, slot = ref.region, ref.slot
    start, stop = ref.interval
    cut = f" in shards of {region.layout.shard_numel} elements from {slot.offset} on"
    return (
        f"expected elements [{start}, {stop}) of shape {ref.shape} on rank "
        f"{region.rank} of {region.layout.world_size},{cut}, got {describe(value)} of "
        f"shape {tuple(value.shape)}, in shards of {value.shard_numel} elements from "
        f"{value.offset} on. Sharded values go back into the layout from which they "
        "came, and another world size, other units, or frozen parameters change the "
        "layout. Save them with torch.distributed.checkpoint and load that into this "
        "model's own state_dict(), or save under FULL_STATE_DICT."
    )
