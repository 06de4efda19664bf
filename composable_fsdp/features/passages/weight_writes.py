"""Copying a forward's writes to the unit's weights into the shards."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import residency
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import slot_path
from composable_fsdp.flat.region import FlatParameter, part_of
from composable_fsdp.flat.residency import set_versions, version_of
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import quoted
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.tree.state import _FSDPState

_SMALL = 1 << 17
"""Bytes of a buffer that is copied."""


def copy_writes(state: _FSDPState, *, all_values: bool) -> None:
    """Copy full parameters that the forward wrote to into the shards."""
    context, handle = state.context, state.handle
    assert context is not None
    now, readable = tuple(map(version_of, handle.form.placed)), handle.form.readable
    in_place = readable is not None and now != readable
    if not in_place and not all_values:
        return
    before = handle.writes.gathered_at
    was_current = before and before == residency.shard_versions(handle)
    if in_place:
        _copy_writes_to_shards(handle)
    if all_values:
        _copy_all_to_shards(handle)
    handle.writes.steps += handle.writes.steps_per_reduction
    if was_current:
        # The shards changed to what the full parameters are.
        handle.writes.gathered_at = residency.shard_versions(handle)
    # The gather stream may gather this unit again in the same forward.
    context.streams.wait_for_caller()


@outside_transforms
@torch.no_grad()
def _copy_writes_to_shards(handle: FlatParamHandle) -> None:
    """Copy this rank's elements of full leaves that were written to into the shards."""
    assert handle.form.readable is not None
    written = {
        id(leaf)
        for leaf, version in zip(handle.form.placed, handle.form.readable, strict=True)
        if leaf._version != version
    }
    # Autograd saved the versions after the write, so those versions stay readable.
    handle.form.readable = tuple(map(version_of, handle.form.placed))
    for region in handle.layout.regions:
        for slot, full, sharded in zip(
            region.layout.parameters, region.full.leaves, region.leaves, strict=True
        ):
            if id(full) not in written:
                continue
            # A write to a low-precision copy would be rounded, or lost at the next
            # all-gather.
            if not region.is_exact:
                raise _inexact(
                    region,
                    f"Parameter {quoted(slot_path(handle, slot))} was written to in "
                    f"the forward of unit {handle.name}, where it is a copy",
                )
            # A full leaf may view the shard itself, which already has the new values.
            if region.full.is_own:
                sharded.copy_(part_of(region, slot, local_of(full), like=sharded))
            # The full leaf's version must equal the sharded leaf's version plus the
            # versions of flat parameters (``residency.make_readable``).
            flats = sum(map(version_of, handle.writes.flat_parameters))
            set_versions((sharded,), (full._version - flats,))


def _inexact(region: FlatParameter, what: str) -> PhaseError:
    """Return the error of a write to full values that are no exact copies."""
    cause, option = "MixedPrecision", "param_dtype"
    if region.layout.wire is not None:
        cause, option = repr(region.layout.wire), "wire"
    return PhaseError(
        f"{what} in {region.full.buffer.dtype} of shards in {region.shard.dtype} "
        f"({cause}), so the write would be lost or rounded. Write between steps, "
        f"inside unshard_params(module), or give the unit no {option}."
    )


def snapshot(handle: FlatParamHandle) -> list[Tensor] | None:
    """Return what tells values of the full buffers apart; None under fake tensors."""
    fulls = [region.full.buffer for region in handle.layout.regions]
    if any(type(full) is not Tensor for full in fulls):
        return None
    # As bytes, since NaN equals no NaN. A copy takes a tenth of the time of a hash.
    return [
        full.view(torch.uint8).clone() if full.nbytes <= _SMALL else hash_values([full])
        for full in fulls
    ]


@outside_transforms
@torch.no_grad()
def _copy_all_to_shards(handle: FlatParamHandle) -> None:
    """Copy this rank's slices of the full parameters into the shards."""
    # All checks have passed, so either every region is copied or none.
    for region in handle.layout.regions:
        if not region.is_exact:
            raise _inexact(
                region,
                f"The forward of unit {handle.name} wrote to its weights through "
                ".data, where they are copies",
            )
    for region in handle.layout.regions:
        if region.full.is_own:
            start = region.rank * region.layout.shard_numel
            region.shard.copy_(
                region.full.buffer[start : start + region.layout.shard_numel]
            )
