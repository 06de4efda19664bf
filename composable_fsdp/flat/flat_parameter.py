"""Flat parameters: one parameter per trainable region, for element-wise optimizers.

It outlives the region and is bound to a new one with the same parameters, or else is
*retired*: without elements, but still the record of its optimizer state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat.gradients import (
    gradient_views,
    note_shown,
    own_gradients,
    ready_gradient,
    views_are_intact,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter, grad_of
from composable_fsdp.planning.layout import RegionLayout


class FlatParamRecord(weakref.ref[FlatParamHandle]):
    """The record of a flat parameter; a weak reference to the unit's handle."""

    __slots__ = ("layout", "parameter", "region")
    parameter: nn.Parameter
    """Kept alive, so that its id is not given to another tensor."""
    layout: RegionLayout
    """Layout of the region that ``parameter`` was bound to last."""
    region: FlatParameter | None
    """The region, or ``None`` after ``parameter`` was retired."""


FLAT_PARAMS: dict[int, FlatParamRecord] = {}


def find_flat(parameter: object) -> tuple[FlatParamHandle, FlatParamRecord] | None:
    """Return unit and record of a flat parameter; ``None`` for other objects."""
    flat = FLAT_PARAMS.get(id(parameter))
    handle = None if flat is None else flat()
    return (handle, flat) if flat is not None and handle is not None else None


def flat_of(handle: FlatParamHandle, region: FlatParameter) -> nn.Parameter:
    """Return the region's flat parameter, which takes over gradients of the leaves."""
    if region.flat is None:
        with torch.inference_mode(False), torch.no_grad():
            rebind_flat_parameter(handle, region, nn.Parameter(region.shard))
            add_own_gradients(handle, region)
    assert region.flat is not None
    return region.flat


def rebind_flat_parameter(
    handle: FlatParamHandle, region: FlatParameter, flat: nn.Parameter
) -> None:
    """Make ``flat`` the flat parameter of ``region``; cast and move its gradient."""
    gradient, flat.grad = flat.grad, None
    if flat.is_meta and not region.shard.is_meta:
        # ``.data =`` cannot turn a meta tensor into a tensor with memory.
        torch.utils.swap_tensors(flat, nn.Parameter(region.shard))  # type: ignore[no-untyped-call]  # untyped in torch
    else:
        flat.data = region.shard
    if flat.grad_dtype != region.gradient.dtype:
        # Without ``grad_dtype``, torch refuses a ``.grad`` whose dtype differs from the
        # parameter's dtype.
        flat.grad_dtype = region.gradient.dtype
    if gradient is not None and not gradient.is_meta:
        flat.grad = gradient.to(region.shard.device, region.gradient.dtype)
    region.flat = flat
    region.graded = (flat, *region.leaves)
    region.holders = (flat, *region.holders)
    handle.writes.flat_parameters = (*handle.writes.flat_parameters, flat)
    known = FlatParamRecord(handle, _forget)
    known.parameter, known.region, known.layout = flat, region, region.layout
    FLAT_PARAMS[id(flat)] = known


def _forget(known: weakref.ref[FlatParamHandle]) -> None:
    """Weak reference callback: delete the record of a unit that was deleted."""
    assert isinstance(known, FlatParamRecord)
    # A rebound flat parameter has a newer record under the same key.
    if FLAT_PARAMS.get(id(known.parameter)) is known:
        del FLAT_PARAMS[id(known.parameter)]


def rebind_flat_parameters(
    handle: FlatParamHandle, before: Iterable[FlatParameter]
) -> None:
    """Bind flat parameters of the old regions ``before`` to the unit's new regions."""
    regions = {_identity(region): region for region in handle.layout.regions}
    for old in before:
        flat = old.flat
        if flat is None:
            continue
        region = regions.get(_identity(old))
        if region is not None:
            rebind_flat_parameter(handle, region, flat)
            continue
        # The optimizer must not step on this parameter again: the gradients go back to
        # the leaves, and the data becomes empty. ``clone``, because the empty slice
        # would keep the memory of the former shard alive.
        for leaf, gradient in zip(old.leaves, leaf_gradients(old), strict=True):
            leaf.grad = gradient
        FLAT_PARAMS[id(flat)].region = flat.grad = None
        flat.data = flat.data[:0].clone()


def _identity(region: FlatParameter) -> tuple[object, ...]:
    """Return a key that is equal for regions with the same parameters and offsets."""
    layout = region.layout
    return layout.padded_numel, *((s.index, s.offset) for s in layout.parameters)


def leaf_gradients(region: FlatParameter) -> list[Tensor | None]:
    """Return each leaf's gradient: ``.grad``, or its part of the flat gradient."""
    if region.flat is None:
        return [leaf.grad for leaf in region.leaves]
    gradient = region.flat.grad
    if gradient is None:
        return [None] * len(region.leaves)
    if gradient is region.gradient.shard and views_are_intact(region):
        return list(region.gradient.views)
    return gradient_views(region, gradient)


def set_leaf_gradient(
    handle: FlatParamHandle, region: FlatParameter, index: int, value: Tensor | None
) -> None:
    """Write the gradient of a leaf, or of its part of the flat parameter."""
    leaf = region.leaves[index]
    if region.flat is None:
        if value is None or index in region.cuts.absent:
            leaf.grad = None
        elif leaf.grad is not None:
            leaf.grad.copy_(value)
        else:
            leaf.grad = value.to(leaf.device, region.gradient.dtype, copy=True)
        return
    if value is None and region.flat.grad is None:
        return
    _hold(handle, region)
    view = region.gradient.views[index]
    if view is not None:
        view.zero_() if value is None else view.copy_(value)


def add_own_gradients(handle: FlatParamHandle, region: FlatParameter) -> None:
    """Move ``.grad`` of the leaves into the flat gradient, by addition."""
    # No Python loop: every optimizer step and every reduction calls this function.
    gradients = [*map(grad_of, region.leaves)]
    if gradients.count(None) == len(gradients):
        return
    _hold(handle, region)
    with torch.no_grad():
        for leaf, view in zip(region.leaves, region.gradient.views, strict=True):
            if leaf.grad is not None:
                if view is not None:
                    view.add_(leaf.grad)
                leaf.grad = None


def flats_in(param_groups: Iterable[dict[str, Any]]) -> list[FlatParamRecord]:
    """Return the records of an optimizer's flat parameters, in group order."""
    if not FLAT_PARAMS:
        return []
    found = [FLAT_PARAMS.get(id(p)) for group in param_groups for p in group["params"]]
    return [flat for flat in found if flat is not None]


def move_own_gradients(flats: Iterable[FlatParamRecord]) -> None:
    """Call ``add_own_gradients`` for ``flats``, before the gradients are used."""
    for flat in flats:
        handle = flat()
        if handle is not None and flat.region is not None:
            add_own_gradients(handle, flat.region)


def _hold(handle: FlatParamHandle, region: FlatParameter) -> None:
    """Make ``gradient.shard`` the gradient of the region's flat parameter."""
    assert region.flat is not None
    # A reduction may be writing into the flat gradient.
    writes = handle.reduction.has_memory or handle.reduction.in_flight
    ready_gradient(region, settled=not writes)
    # Parts without a gradient become zeros.
    own_gradients(region)
    region.flat.grad = region.gradient.shard
    # A user can reach every part of ``gradient.shard`` through ``flat.grad``.
    note_shown(region, bytes([1]) * len(region.leaves))
