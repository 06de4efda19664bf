"""The flat gradient of a region belongs to whoever has a part of it.

``.grad`` of the leaves are views of one flat gradient. When no leaf shows one any more,
after ``zero_grad``, it is let go: at the next forward, whose activations can have the
memory, at the latest at the next reduction, which makes another. So a gradient that
somebody kept keeps its values, as after autograd. It is let go, too, if the views do
not view it any more (``p.grad.data = ...``).

What a leaf shows is the user's: cleared on some leaves, swapped, or a tensor of their
own. Then sums are added to each leaf's gradient by itself, in place, as autograd does,
and a leaf whose view was shown and cleared gets memory of its own: somebody may have
kept the view.
"""

from __future__ import annotations

from operator import or_

import torch
from torch import Tensor

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import (
    FlatParameter,
    make_grad_shard,
    shard_views,
    with_absent,
)


def ready_gradient(region: FlatParameter, *, rows: bool, settled: bool = True) -> None:
    """Make the flat gradient, if there is none that leaves show. Sends nothing.

    Not ``settled``: a reduction may be on its way into the one there is, so it stays.
    Values are undefined where no leaf shows any.
    """
    # In a steady state the forward has let it go, and nothing is looked at.
    may_go = region.grad_shard is not None and settled and region.in_flight is None
    if may_go and not (_is_shown(region) and views_are_intact(region)):
        _free_gradient(region)
    if region.grad_shard is None:
        make_grad_shard(region, rows=rows)


def views_are_intact(region: FlatParameter) -> bool:
    """Whether the views of the flat gradient, if there is one, view it still."""
    if region.grad_shard is None:
        return True
    # The place of an empty view is 0.
    places = [0 if view is None else view.data_ptr() for view in region.grad_views]
    return region.grad_places == (region.grad_shard.data_ptr(), *places)


def free_cleared(handle: FlatParamHandle) -> None:
    """Let go of flat gradients that no leaf shows. Sends nothing."""
    if handle.reduce_has_memory:
        return  # a reduction may be on its way into them
    for region in handle.trainable:
        # On the host it is in the way of no activation.
        if region.grad_shard is None or region.offload or _is_shown(region):
            continue
        _free_gradient(region)


def _is_shown(region: FlatParameter) -> bool:
    """Whether a gradient is there that may be a part of the flat one."""
    if region.flat is not None and region.flat.grad is not None:
        return True
    for leaf in region.leaves:  # noqa: SIM110  # a generator would take longer
        if leaf.grad is not None:
            return True
    return False


def _free_gradient(region: FlatParameter) -> None:
    region.grad_shard = None
    region.grad_views = region.grad_gaps = ()
    region.grad_places = ()


def add_to_all(region: FlatParameter, sums: Tensor, arrived: bytes) -> bool:
    """Add ``sums`` ``(shard_numel,)`` to the flat gradient, if that is right for all.

    It is if all leaves that ``arrived`` show their parts of it. Parts that no leaf
    shows, and padding, are zero first: what a user multiplies a whole gradient by (0
    times inf is NaN) must not stay in it. False, and nothing is done, if one shows
    something else, or none where somebody may have kept the part. Sends nothing.
    """
    grad_shard = region.grad_shard
    assert grad_shard is not None
    stale = list(region.grad_gaps)
    for leaf, view, hit, shown in zip(
        region.leaves, region.grad_views, arrived, region.shown, strict=True
    ):
        gradient = leaf.grad
        if view is None:
            continue  # of no element
        if gradient is None:
            if not shown:
                stale.append(view)
            elif hit:
                return False
        elif gradient is not view:
            return False
    if stale:
        torch._foreach_zero_(stale)
    grad_shard.add_(sums)
    return True


@torch.no_grad()
def add_to_each(
    region: FlatParameter, sums: Tensor, arrived: bytes, *, rows: bool
) -> None:
    """Add parts of ``sums`` ``(shard_numel,)`` to the gradients of leaves that arrived.

    In place, whatever tensors they are; a leaf without one gets its part. Sends
    nothing.
    """
    views, _ = shard_views(region, sums, rows=rows)
    parts = with_absent(region, views)
    for leaf, part, hit in zip(region.leaves, parts, arrived, strict=True):
        if not hit:
            continue
        if part is None:
            leaf.grad = None
        elif leaf.grad is None:
            leaf.grad = part.to(region.grad_dtype, copy=True)
        else:
            leaf.grad.add_(part)


@torch.no_grad()
def own_gradients(region: FlatParameter, *, rows: bool) -> None:
    """Have ``grad_shard`` hold the gradients there are, and zeros where there is none.

    The leaves, or the flat parameter, show it then. It is made anew if somebody may
    have kept a part that is written to. Sends nothing.
    """
    flat = region.flat
    if flat is not None:
        earlier = flat.grad
        if earlier is not region.grad_shard:
            if 1 in region.shown:
                make_grad_shard(region, rows=rows)
            assert region.grad_shard is not None
            if earlier is None:
                region.grad_shard.zero_()
            else:
                region.grad_shard.copy_(earlier)
        if region.grad_gaps:
            torch._foreach_zero_(region.grad_gaps)
        return
    gradients = [leaf.grad for leaf in region.leaves]
    if any(
        shown and gradient is not view
        for gradient, view, shown in zip(
            gradients, region.grad_views, region.shown, strict=True
        )
    ):
        make_grad_shard(region, rows=rows)
    stale = list(region.grad_gaps)
    for leaf, gradient, view in zip(
        region.leaves, gradients, region.grad_views, strict=True
    ):
        if view is None:
            leaf.grad = None  # of no element, if a user has set it
        elif gradient is None:
            stale.append(view)
        elif gradient is not view:
            # Set by the user: from here on it lives in the flat gradient.
            view.copy_(gradient)
            leaf.grad = view
    note_shown(region, bytes([each is not None for each in gradients]))
    if stale:
        torch._foreach_zero_(stale)


def note_shown(region: FlatParameter, parts: bytes) -> None:
    """Note that these parts of ``grad_shard``, too, are gradients."""
    if region.shown != parts:
        region.shown = bytes(map(or_, region.shown, parts))
