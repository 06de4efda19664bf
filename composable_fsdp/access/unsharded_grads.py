"""Full gradients on the full parameters of a unit, while a block runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_flat_values, spread_flat_values
from composable_fsdp.comm import collectives
from composable_fsdp.flat import memory
from composable_fsdp.flat.build_region import full_views
from composable_fsdp.flat.flat_parameter import leaf_gradients, set_leaf_gradient
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter

T = TypeVar("T")


class UnshardedGrads:
    """The gradients that a block shows on the full ``leaves``.

    ``leaves`` is empty on ranks that show no full parameters.
    """

    __slots__ = ("_handle", "_leaves", "_rank0_only")

    def __init__(
        self, handle: FlatParamHandle, leaves: list[nn.Parameter], rank0_only: bool
    ) -> None:
        self._handle, self._leaves = handle, leaves
        self._rank0_only = rank0_only

    @torch.no_grad()
    def write_back(self) -> None:
        """Set the sharded gradients to this rank's part of the block's full gradients.

        Collective: none; with ``rank0_only`` a single broadcast with a byte per
            parameter over the shard group and over the replicate group, and a scatter
            per region.
        """
        handle = self._handle
        has = _flags(handle, [leaf.grad for leaf in self._leaves])
        # Only rank 0 knows which gradients the block left; the scatter below needs the
        # same regions on all ranks.
        if self._rank0_only:
            for group in handle.groups.present:
                collectives.broadcast(has, group)
        wanted = has.tolist()
        shards = [
            _new_shard(handle, region, flags)
            for region, flags in _by_region(handle, wanted)
        ]
        fulls = []
        if self._leaves:
            fulls = [
                _full_gradient(handle, region, leaves)
                for region, leaves in _by_region(handle, self._leaves)
            ]
        spread_flat_values(handle, shards, fulls, from_first=self._rank0_only)
        for (region, flags), shard in zip(
            _by_region(handle, wanted), shards, strict=True
        ):
            _set_gradients(handle, region, flags, shard)

    def hide(self) -> None:
        """Remove the gradients from the full parameters, which outlive the block."""
        for leaf in self._leaves:
            leaf.grad = None


@torch.no_grad()
def unshard_grads(
    handle: FlatParamHandle,
    leaves: list[nn.Parameter],
    *,
    rank0_only: bool,
    to_cpu: bool,
) -> UnshardedGrads:
    """Set ``.grad`` of the full parameters ``leaves`` to the full gradients.

    Returns: the gradients shown, for ``write_back`` and ``hide``.
    Collective: over the shard group a single all-reduce with a byte per parameter; if
        any rank has a gradient, an all-gather, or with ``rank0_only`` a gather per
        region.
    """
    group = handle.groups.shard
    own = [g for r in handle.layout.regions for g in leaf_gradients(r)]
    # A rank may hold no element of a parameter, and so no gradient, but must send the
    # same as the other ranks: agree first which parameters have a gradient.
    has = _flags(handle, own)
    if group is not None and has.numel():
        collectives.all_reduce(has, group, maximum=True)
    wanted = has.tolist()
    shown = UnshardedGrads(handle, leaves, rank0_only)
    # No rank has a gradient, so no rank gathers.
    if not any(wanted):
        return shown
    shards = []
    for (region, flags), (_, gradients) in zip(
        _by_region(handle, wanted), _by_region(handle, own), strict=True
    ):
        # A copy in flat order: ``.grad`` of single parameters may be tensors of the
        # user.
        shard = _new_shard(handle, region, flags)
        if shard.numel():
            views, _ = shard_views(region.cuts, shard)
            for gradient, view in zip(gradients, views, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
        shards.append(shard)
    fulls = gather_flat_values(handle, shards, first_only=rank0_only)
    if not leaves:
        return shown
    for (region, flags), (_, full_leaves), full in zip(
        _by_region(handle, wanted), _by_region(handle, leaves), fulls, strict=True
    ):
        if not any(flags):
            continue
        # As the full parameters with offload_to_cpu, the gradients live in host memory.
        views, _ = full_views(region.layout, full.cpu() if to_cpu else full)
        for leaf, view, flag, slot in zip(
            full_leaves, views, flags, region.layout.parameters, strict=True
        ):
            # A DTensor takes no plain tensor as ``.grad``.
            whole = handle.layout.forms[slot.index].shown(view)
            leaf.grad = whole if flag else None
    return shown


def _by_region(
    handle: FlatParamHandle, values: list[T]
) -> list[tuple[FlatParameter, list[T]]]:
    """Split ``values``, an entry per parameter of the unit, by region."""
    result, start = [], 0
    for region in handle.layout.regions:
        stop = start + len(region.leaves)
        result.append((region, values[start:stop]))
        start = stop
    return result


def _flags(handle: FlatParamHandle, gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a byte per parameter on the compute device: 1 with a gradient.

    Without ``gradients`` (a rank that shows no full parameters) all bytes are 0.
    """
    held = [each is not None for each in gradients] or [False] * len(handle.leaves)
    return torch.tensor(held, dtype=torch.uint8, device=handle.layout.device)


def _new_shard(
    handle: FlatParamHandle, region: FlatParameter, flags: list[int]
) -> Tensor:
    """Return zeros ``(shard_numel,)``; empty if no parameter has a gradient."""
    numel = region.layout.shard_numel if any(flags) else 0
    return memory.new_buffer(numel, region.layout.dtype, handle.layout.device).zero_()


def _full_gradient(
    handle: FlatParamHandle, region: FlatParameter, leaves: list[nn.Parameter]
) -> Tensor:
    """Return the gradients of the full ``leaves`` as ``(padded_numel,)``, or empty."""
    if all(leaf.grad is None for leaf in leaves):
        return memory.new_buffer(0, region.layout.dtype, handle.layout.device)
    numel = region.layout.padded_numel
    full = memory.new_buffer(numel, region.layout.dtype, handle.layout.device).zero_()
    views, _ = full_views(region.layout, full)
    for leaf, view, slot in zip(leaves, views, region.layout.parameters, strict=True):
        if leaf.grad is not None:
            # The block may have set a gradient of other placements.
            given = handle.layout.forms[slot.index].gradient(leaf.grad)
            # A sparse gradient is converted: an exception here would leave the other
            # ranks waiting.
            view.copy_(given.to_dense())
    return full


def _set_gradients(
    handle: FlatParamHandle, region: FlatParameter, flags: list[int], shard: Tensor
) -> None:
    """Set ``.grad`` of sharded parameters to their parts of ``shard``, or to None."""
    if not any(flags):
        # The shard is empty then, so there are no views.
        if region.flat is not None:
            region.flat.grad = None
        for leaf in region.leaves:
            leaf.grad = None
        return
    views, _ = shard_views(region.cuts, shard)
    for i, flag in enumerate(flags):
        set_leaf_gradient(handle, region, i, views[i] if flag else None)
