"""Writes of a forward to its unit's weights: they reach the shards.

A forward that normalises or clamps its weights writes to the full leaves, whose memory
is freed. A write in place moves the version counter of its leaf, which every forward
compares. A write through ``.data`` moves none: the first forwards compare checksums,
and where they find such a write every later forward copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.versions import set_versions, version_of
from composable_fsdp.naming import join_name, quoted

_AT_ONCE = 1 << 20
"""Elements whose checksum is taken in one operation, which needs memory for them."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def was_written(handle: FlatParamHandle) -> bool:
    """Whether a full leaf was written to in place since the leaves became readable."""
    now = tuple(map(version_of, handle.full_placed))
    return now != handle.readable and handle.readable is not None


def copy_writes_to_shards(handle: FlatParamHandle) -> None:
    """Copy full leaves that were written to into the shards, on the current stream.

    Each rank copies the elements that it holds. The leaves stay readable, with the
    versions that autograd saved after the write. Sends nothing.

    Raises: PhaseError, naming the parameter, if the full leaves are copies in another
    dtype, from which the shard cannot be written without loss.
    """
    assert handle.readable is not None
    written = {
        id(leaf)
        for leaf, version in zip(handle.full_placed, handle.readable, strict=True)
        if leaf._version != version
    }
    handle.readable = tuple(map(version_of, handle.full_placed))
    for region in handle.regions:
        for index, leaf in enumerate(region.full_leaves):
            if id(leaf) in written:
                _copy_write_to_shard(handle, region, index)


@torch.no_grad()
def _copy_write_to_shard(
    handle: FlatParamHandle, region: FlatParameter, index: int
) -> None:
    slot = region.layout.parameters[index]
    full, sharded = region.full_leaves[index], region.leaves[index]
    if full.dtype != sharded.dtype:
        raise PhaseError(
            f"Parameter {quoted(join_name(handle.full_fqn, slot.fqn))} was written to "
            "in the "
            f"forward of unit {handle.name}, where it is a copy in {full.dtype} of "
            f"shards in {sharded.dtype} (MixedPrecision), so the write would be lost "
            "or rounded. Write to it between steps, inside unshard_params(module), or "
            "give the unit no param_dtype."
        )
    if region.is_cut:
        start, stop = region.layout.interval(slot, region.rank)
        if stop > start:
            sharded.view(-1).copy_(full.view(-1)[start:stop])
    versions = full._version - sum(map(version_of, handle.handed_out))
    set_versions((sharded,), (versions,))


def checksums(handle: FlatParamHandle) -> list[Tensor] | None:
    """A number per region that changes with the full parameters; None under fakes.

    Equal on all ranks, as the full parameters are. Sends nothing.
    """
    if any(type(region.full) is not Tensor for region in handle.regions):
        return None
    return [_checksum(region.full) for region in handle.regions]


def _checksum(full: Tensor) -> Tensor:
    if full.is_complex():
        full = torch.view_as_real(full).flatten()
    # Of integers, so that neither the order of sums nor a NaN counts.
    words = full.view(_WORDS[full.element_size()])
    # With weights, so that a permutation counts.
    weights = torch.arange(1, min(len(words), _AT_ONCE) + 1, device=full.device)
    parts = torch.split(words, _AT_ONCE)
    return torch.stack([(part * weights[: len(part)]).sum() for part in parts])


@torch.no_grad()
def copy_all_to_shards(handle: FlatParamHandle) -> None:
    """Copy this rank's slices of the full parameters into the shards. Sends nothing.

    Raises: PhaseError, naming the unit, if they are copies in another dtype.
    """
    for region in handle.regions:
        if region.full.dtype != region.shard.dtype:
            raise PhaseError(
                f"The forward of unit {handle.name} wrote to its weights through "
                f".data, where they are copies in {region.full.dtype} of shards in "
                f"{region.shard.dtype} (MixedPrecision), so the write would be lost or "
                "rounded. Write between steps, inside unshard_params(module), or give "
                "the unit no param_dtype."
            )
    for region in handle.regions:
        if region.is_cut:
            start = region.rank * region.layout.shard_numel
            region.shard.copy_(region.full[start : start + region.layout.shard_numel])
