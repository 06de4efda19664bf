"""Hooks that users registered on the original parameters, called when we reduce.

Autograd never sees a sharded leaf, so nobody else would call them. As in a plain model
the tensor hooks (``register_hook``) come first and may replace what has just been
computed; the hooks after accumulation find the total in ``.grad``. Both get this rank's
part, averaged over ranks, in the dtype of ``.grad``: once per reduction, also where the
rank holds no element of the parameter, because a hook may send something. There the
part is empty, and ``.grad`` shows it only while the hooks run.

``_backward_hooks`` and ``_post_accumulate_grad_hooks`` are private attributes of a
tensor: a dict, or None where nobody registered (checked on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor, nn

from composable_fsdp.flat.flat_parameter import grad_of
from composable_fsdp.flat.gradients import note_shown
from composable_fsdp.flat.region import FlatParameter, shard_views

tensor_hooks_of = attrgetter("_backward_hooks")
_post_hooks_of = attrgetter("_post_accumulate_grad_hooks")


@torch.no_grad()
def call_tensor_hooks(
    region: FlatParameter, sums: Tensor, arrived: bytes, *, rows: bool
) -> None:
    """Show ``sums`` ``(shard_numel,)`` to the leaves' hooks, and take what they give.

    Only those of leaves that get a gradient now.
    """
    views, _ = shard_views(region, sums, rows=rows)
    for leaf, view, hit in zip(region.leaves, views, arrived, strict=True):
        if not hit or not leaf._backward_hooks:
            continue
        gradient = given = view.to(region.grad_dtype)
        for hook in tuple(leaf._backward_hooks.values()):
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
        if gradient is not given:
            view.copy_(gradient)


def hooked_leaves(region: FlatParameter, arrived: bytes) -> list[nn.Parameter]:
    """The leaves that got a gradient and have a hook after accumulation."""
    return [
        leaf
        for leaf, hit in zip(region.leaves, arrived, strict=True)
        if hit and leaf._post_accumulate_grad_hooks
    ]


@torch.no_grad()
def call_post_hooks(leaves: Iterable[nn.Parameter]) -> None:
    """Call the hooks of leaves whose ``.grad`` was just set or added to."""
    for leaf in leaves:
        hooks = leaf._post_accumulate_grad_hooks
        is_absent = not leaf.numel() and leaf.grad is None
        if is_absent:
            leaf.grad = torch.empty_like(leaf, dtype=leaf.grad_dtype)
        for hook in tuple(hooks.values()) if hooks else ():
            hook(leaf)
        if is_absent:
            leaf.grad = None


def show_flat_gradient(region: FlatParameter, arrived: bytes | bytearray) -> None:
    """Make ``grad_shard`` the gradient of the region's flat parameter.

    One assignment. Leaves are looked at one by one only if one has a hook after
    accumulation, which then finds its part in ``.grad``.
    """
    if 1 in arrived:
        assert region.flat is not None
        region.flat.grad = region.grad_shard
        note_shown(region, bytes(arrived))
        if any(map(_post_hooks_of, region.leaves)):
            _call_flat_post_hooks(region, arrived)


@torch.no_grad()
def _call_flat_post_hooks(region: FlatParameter, arrived: bytes | bytearray) -> None:
    """Show the hooked leaves their parts of the flat gradient while the hooks run."""
    for leaf, view, hit in zip(region.leaves, region.grad_views, arrived, strict=True):
        if hit and leaf._post_accumulate_grad_hooks:
            own, leaf.grad = leaf.grad, view
            call_post_hooks([leaf])
            left, leaf.grad = grad_of(leaf), own
            if view is None:
                continue
            if left is None:
                view.zero_()
            elif left is not view:
                view.copy_(left)
