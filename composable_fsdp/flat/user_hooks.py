"""Hooks that users registered on the sharded parameters, called after the reduction.

As in a plain model, tensor hooks run first and may replace the new gradient;
post-accumulate-grad hooks find the total in ``.grad``. Both see this rank's part,
averaged over ranks, once per reduction, also on a rank without elements of the
parameter, because a hook may issue a collective.

``_backward_hooks`` and ``_post_accumulate_grad_hooks`` are private attributes of a
tensor: a dict, or None without hooks (checked on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat.gradients import note_shown, own_gradients, shard_views
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.flat.region import FlatParameter, grad_of, post_hooks_of
from composable_fsdp.naming import quoted

HOOK_WATCHES: list[Callable[[nn.Parameter, Tensor], AbstractContextManager[None]]] = []
"""What stands around each hook, by parameter and gradient (``features.defaults``)."""


@torch.no_grad()
def call_tensor_hooks(region: FlatParameter, sums: Tensor, arrived: bytes) -> None:
    """Call the tensor hooks of parameters that get a gradient now.

    Collective: none, except the collectives of the hooks.
    """
    views, _ = shard_views(region.cuts, sums)
    for leaf, view, hit in zip(region.leaves, views, arrived, strict=True):
        if not hit or not leaf._backward_hooks:
            continue
        gradient = given = view.to(region.gradient.dtype)
        for hook in tuple(leaf._backward_hooks.values()):
            replaced = _called(hook, gradient, leaf, gradient)
            gradient = gradient if replaced is None else replaced
        # A hook has replaced the gradient: write the result back into the sums.
        if gradient is not given:
            view.copy_(gradient)


def _called(
    hook: Callable[[Tensor], Any], given: Tensor, leaf: nn.Parameter, gradient: Any
) -> Any:
    """Call a hook of the user; an error names the parameter."""
    try:
        with ExitStack() as around:
            for watch in HOOK_WATCHES if gradient is not None else ():
                around.enter_context(watch(leaf, gradient))
            return hook(given)
    except Exception as error:
        ref = find_param(leaf)
        if ref is not None:
            note = (
                f"In a hook of parameter {quoted(ref.name)} {ref.shape}: it gets the "
                f"gradient of this rank's part, {tuple(leaf.shape)}."
            )
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # before Python 3.11
                error.args = (f"{error}\n{note}",)
        raise


@torch.no_grad()
def call_post_hooks(leaves: Iterable[nn.Parameter]) -> None:
    """Call the hooks of parameters whose ``.grad`` was just set or added to."""
    for leaf in leaves:
        hooks = leaf._post_accumulate_grad_hooks
        # A parameter without elements on this rank has ``.grad`` only while the hooks
        # run.
        is_absent = not leaf.numel() and leaf.grad is None
        if is_absent:
            leaf.grad = torch.empty_like(leaf, dtype=leaf.grad_dtype)
        for hook in tuple(hooks.values()) if hooks else ():
            _called(hook, leaf, leaf, leaf.grad)
        if is_absent:
            leaf.grad = None


def show_on_flat(
    region: FlatParameter, sums: Tensor | None, arrived: bytes | bytearray
) -> list[nn.Parameter]:
    """Add reduced gradients to ``.grad`` of the flat parameter; call the leaves' hooks.

    Collective: none, except the collectives of the hooks.
    """
    if sums is not None:
        own_gradients(region)
        assert region.gradient.shard is not None
        region.gradient.shard.add_(sums)
    if 1 in arrived:
        assert region.flat is not None
        region.flat.grad = region.gradient.shard
        note_shown(region, bytes(arrived))
        # A single assignment serves all parameters. Single parameters are visited only
        # if any of them has a post-accumulate-grad hook.
        if any(map(post_hooks_of, region.leaves)):
            _call_flat_post_hooks(region, arrived)
    return []


@torch.no_grad()
def _call_flat_post_hooks(region: FlatParameter, arrived: bytes | bytearray) -> None:
    """Run post-accumulate-grad hooks with ``.grad`` viewing the flat gradient."""
    for leaf, view, hit in zip(
        region.leaves, region.gradient.views, arrived, strict=True
    ):
        if hit and leaf._post_accumulate_grad_hooks:
            own, leaf.grad = leaf.grad, view
            call_post_hooks([leaf])
            # A hook may have replaced or cleared ``.grad``; the result is copied into
            # the flat gradient.
            left, leaf.grad = grad_of(leaf), own
            if view is None:
                continue
            if left is None:
                view.zero_()
            elif left is not view:
                view.copy_(left)
