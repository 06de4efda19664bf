"""Flat parameters: one per trainable region, handed out to an element-wise optimizer.

::

    flat   nn.Parameter (shard_numel,)   its data is ``shard``, its ``.grad`` is all of
                                         ``grad_shard``; the leaves' ``.grad`` stay None

The object outlives its region: when a unit is laid out or built anew, it goes on with
the region that holds the same parameters. Where none does, because some were frozen or
unfrozen, it is *retired*: it has no elements, is told from others, and still knows
which elements of its optimizer's state belonged to which parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat.gradients import (
    note_shown,
    own_gradients,
    ready_gradient,
    views_are_intact,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import (
    FlatParameter,
    shard_views,
    with_absent,
)
from composable_fsdp.planning.layout import RegionLayout

grad_of = attrgetter("grad")


class FlatParamRecord(weakref.ref[FlatParamHandle]):
    """What is known of one flat parameter; a weak reference to its unit's handle."""

    __slots__ = ("key", "layout", "parameter", "rank", "region")
    key: int
    parameter: nn.Parameter
    """Kept alive, so that its identity is not given to another tensor."""
    layout: RegionLayout
    rank: int
    region: FlatParameter | None
    """``None`` once it is retired."""


FLAT_PARAMS: dict[int, FlatParamRecord] = {}


def find_flat(parameter: object) -> tuple[FlatParamHandle, FlatParamRecord] | None:
    """The unit of a flat parameter, and what is known of it; ``None`` if it is none."""
    flat = FLAT_PARAMS.get(id(parameter))
    handle = None if flat is None else flat()
    return (handle, flat) if flat is not None and handle is not None else None


def flat_of(handle: FlatParamHandle, region: FlatParameter) -> nn.Parameter:
    """The region's flat parameter, made now if there is none. Sends nothing.

    Gradients of the leaves become its gradient, and the leaves have none any more.
    """
    if region.flat is None:
        with torch.inference_mode(False), torch.no_grad():
            flat = nn.Parameter(region.shard)
            rebind_flat_parameter(handle, region, flat)
            if any(leaf.grad is not None for leaf in region.leaves):
                settled = not handle.reduce_has_memory
                ready_gradient(region, rows=handle.rows, settled=settled)
                region.flat = None
                own_gradients(region, rows=handle.rows)
                for leaf in region.leaves:
                    leaf.grad = None
                region.flat, flat.grad = flat, region.grad_shard
    assert region.flat is not None
    return region.flat


def rebind_flat_parameter(
    handle: FlatParamHandle, region: FlatParameter, flat: nn.Parameter
) -> None:
    """Make ``flat`` the flat parameter of ``region``, whatever it was of before.

    Its gradient comes along, cast and moved as the region is.
    """
    gradient, flat.grad = flat.grad, None
    if flat.is_meta and not region.shard.is_meta:
        # Of another kind: no ``.data =`` can do that.
        torch.utils.swap_tensors(flat, nn.Parameter(region.shard))  # type: ignore[no-untyped-call]  # untyped in torch
    else:
        flat.data = region.shard
    if flat.grad_dtype != region.grad_dtype:
        flat.grad_dtype = region.grad_dtype
    if gradient is not None and not gradient.is_meta:
        flat.grad = gradient.to(region.shard.device, region.grad_dtype)
    region.flat = flat
    handle.handed_out = tuple([r.flat for r in handle.regions if r.flat is not None])
    known = FlatParamRecord(handle, _forget)
    known.key, known.parameter, known.region = id(flat), flat, region
    known.layout, known.rank = region.layout, region.rank
    FLAT_PARAMS[id(flat)] = known


def _forget(known: weakref.ref[FlatParamHandle]) -> None:
    assert isinstance(known, FlatParamRecord)
    if FLAT_PARAMS.get(known.key) is known:
        del FLAT_PARAMS[known.key]


def rebind_flat_parameters(
    handle: FlatParamHandle, before: Iterable[FlatParameter]
) -> bool:
    """Give the unit's new regions the flat parameters of those ``before``.

    One goes on where the same parameters are cut alike; the others are retired, and the
    gradients they held become those of the leaves. Returns whether any was. Sends
    nothing.
    """
    regions = {_identity(region): region for region in handle.regions}
    retired = False
    for old in before:
        flat = old.flat
        if flat is None:
            continue
        region = regions.get(_identity(old))
        if region is not None:
            rebind_flat_parameter(handle, region, flat)
            continue
        retired = True
        for leaf, gradient in zip(old.leaves, leaf_gradients(old, handle), strict=True):
            leaf.grad = gradient
        known = FLAT_PARAMS[id(flat)]
        known.region = flat.grad = None
        flat.data = flat.data[:0].clone()
    return retired


def _identity(region: FlatParameter) -> tuple[object, ...]:
    layout = region.layout
    return layout.padded_numel, *((s.index, s.offset) for s in layout.parameters)


def leaf_gradients(
    region: FlatParameter, handle: FlatParamHandle
) -> list[Tensor | None]:
    """Each leaf's gradient: its own, or its part of the flat parameter's."""
    if region.flat is None:
        return [leaf.grad for leaf in region.leaves]
    gradient = region.flat.grad
    if gradient is None:
        return [None] * len(region.leaves)
    if gradient is region.grad_shard and views_are_intact(region):
        return list(region.grad_views)
    views, _ = shard_views(region, gradient, rows=handle.rows)
    return list(with_absent(region, views))


def set_leaf_gradient(
    handle: FlatParamHandle, region: FlatParameter, index: int, value: Tensor | None
) -> None:
    """Write one leaf's gradient; in a flat one, zeros stand for ``None``.

    A leaf that has no element here has none.
    """
    leaf = region.leaves[index]
    if region.flat is None:
        if value is None or index in region.absent:
            leaf.grad = None
        elif leaf.grad is not None:
            leaf.grad.copy_(value)
        else:
            leaf.grad = value.to(leaf.device, region.grad_dtype, copy=True)
        return
    if value is None and region.flat.grad is None:
        return
    _hold(handle, region)
    view = region.grad_views[index]
    if view is None:
        return
    if value is None:
        view.zero_()
    else:
        view.copy_(value)


def add_own_gradients(handle: FlatParamHandle, region: FlatParameter) -> None:
    """Add what leaves have as ``.grad`` of their own to the flat gradient.

    A loss gives it to them that uses the sharded parameters beside their unit, as a
    penalty on weights does, or a user who sets it. Asks without a loop in Python,
    because optimizer steps and reductions call it.
    """
    gradients = [*map(grad_of, region.leaves)]
    if gradients.count(None) != len(gradients):
        _add(handle, region)


@torch.no_grad()
def _add(handle: FlatParamHandle, region: FlatParameter) -> None:
    _hold(handle, region)
    for leaf, view in zip(region.leaves, region.grad_views, strict=True):
        if leaf.grad is not None:
            if view is not None:
                view.add_(leaf.grad)
            leaf.grad = None


def flats_in(param_groups: Iterable[dict[str, Any]]) -> list[FlatParamRecord]:
    """The flat parameters among an optimizer's, in its order.

    One look-up in C for each parameter where there are none.
    """
    if not FLAT_PARAMS:
        return []
    return [
        FLAT_PARAMS[id(parameter)]
        for group in param_groups
        if not FLAT_PARAMS.keys().isdisjoint(map(id, group["params"]))
        for parameter in group["params"]
        if id(parameter) in FLAT_PARAMS
    ]


def move_own_gradients(flats: Iterable[FlatParamRecord]) -> None:
    """``add_own_gradients`` for each of ``flats``; before their gradients are used."""
    for flat in flats:
        handle = flat()
        if handle is not None and flat.region is not None:
            add_own_gradients(handle, flat.region)


def move_gradients_in(handles: Iterable[FlatParamHandle]) -> None:
    """``add_own_gradients`` for each of the units; when a backward ends."""
    if FLAT_PARAMS:
        for handle in handles:
            for region in handle.trainable:
                if region.flat is not None:
                    add_own_gradients(handle, region)


def _hold(handle: FlatParamHandle, region: FlatParameter) -> None:
    assert region.flat is not None
    settled = not handle.reduce_has_memory
    ready_gradient(region, rows=handle.rows, settled=settled)
    own_gradients(region, rows=handle.rows)
    region.flat.grad = region.grad_shard
    note_shown(region, bytes([1]) * len(region.leaves))


def clear_flat_gradients(handle: FlatParamHandle, *, set_to_none: bool) -> None:
    """Clear the gradients of the unit's flat parameters, as ``zero_grad`` does."""
    for region in handle.trainable:
        if region.flat is not None and region.flat.grad is not None:
            if set_to_none:
                region.flat.grad = None
            else:
                region.flat.grad.zero_()
