"""Copies of gradients to the host, for units with offloaded shards.

A copy is ordered by the reduce stream only (of hybrid units the all-reduce stream): the
parameters have no ``.grad`` until the host has waited, once, at the end of backward,
and the host accesses the flat gradient only before the first copy of a backward.
"""

from __future__ import annotations

from torch import Tensor, nn

from composable_fsdp.comm.device import copy_async
from composable_fsdp.flat import memory
from composable_fsdp.flat.gradients import note_shown, own_gradients
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter, HostCopy
from composable_fsdp.flat.user_hooks import call_post_hooks, show_on_flat
from composable_fsdp.tree.state import RuntimeContext


def start_d2h_grad_copies(region: FlatParameter, sums: Tensor, arrived: bytes) -> None:
    """Copy ``sums`` to ``gradient.shard`` on the host, added to earlier gradients."""
    copy = region.host_copy
    if copy is None:
        copy = region.host_copy = _take_gradients(region)
    grad_shard = region.gradient.shard
    assert grad_shard is not None
    if any(copy.arrived):
        # Earlier gradients are added on the device, where the stream orders both
        # operands. Temporary tensors are allocated and freed on that stream, so
        # their memory is reused only after the copy.
        earlier = memory.new_buffer(sums.numel(), grad_shard.dtype, sums.device)
        copy_async(earlier, grad_shard)
        sums = earlier.add_(sums)
    # The flat gradient is pinned, because a copy to pageable memory would be
    # synchronous. A cleared flat gradient is allocated anew from torch's cache of
    # pinned memory.
    copy_async(grad_shard, sums)
    for index, hit in enumerate(arrived):
        if hit:
            copy.arrived[index] = 1


def _take_gradients(region: FlatParameter) -> HostCopy:
    """Move gradients into the flat gradient, for a copy that adds to them."""
    if region.flat is not None:
        held = bytearray([region.flat.grad is not None]) * len(region.leaves)
        if any(held):
            own_gradients(region)
            region.flat.grad = None
        return HostCopy(held, {})
    owned: dict[int, Tensor] = {}
    held = bytearray(leaf.grad is not None for leaf in region.leaves)
    if any(held):
        # Tensors that the user assigned to ``.grad`` stay the gradients: ``_show``
        # copies the result into these tensors.
        owned = {
            i: leaf.grad
            for i, (leaf, view) in enumerate(
                zip(region.leaves, region.gradient.views, strict=True)
            )
            if leaf.grad is not None and leaf.grad is not view is not None
        }
        own_gradients(region)
        for leaf in region.leaves:
            leaf.grad = None
    return HostCopy(held, owned)


def finish_d2h_grad_copies(context: RuntimeContext) -> None:
    """Wait until the gradients are on the host, and set ``.grad``."""
    if not context.marked.offload:
        return
    # The only point of a step at which the CPU waits. The wait includes copies of
    # shards to the device, which an optimizer is about to overwrite.
    context.streams.synchronize()
    hooked: list[nn.Parameter] = []
    for handle in context.handles:
        for region in handle.layout.trainable:
            copy = region.host_copy
            if copy is not None:
                region.host_copy = None
                if region.flat is not None:
                    show_on_flat(region, None, copy.arrived)
                else:
                    hooked += _show(region, copy)
    call_post_hooks(hooked)


def _show(region: FlatParameter, copy: HostCopy) -> list[nn.Parameter]:
    """Set ``.grad`` and return the parameters whose ``.grad`` was set."""
    shown = []
    landed, owned = copy.arrived, copy.owned
    note_shown(region, bytes(landed))
    for i, (leaf, view, hit) in enumerate(
        zip(region.leaves, region.gradient.views, landed, strict=True)
    ):
        if not hit:
            continue
        if leaf.grad is not None and view is not None:
            # The loss also used the sharded parameter directly, and autograd has set
            # ``.grad``.
            view.add_(leaf.grad)
        leaf.grad = owned[i].copy_(view) if i in owned and view is not None else view
        shown.append(leaf)
    return shown


def drop_d2h_grad_copies(context: RuntimeContext) -> None:
    """Wait for the gradients that are being copied to the host, and discard them."""
    if not context.marked.offload:
        return
    context.streams.synchronize()
    for handle in context.handles:
        for region in handle.layout.trainable:
            region.host_copy = None


def synchronize_copy_stream(context: RuntimeContext) -> None:
    """Wait until no copy to the device reads shards; the host may then write shards."""
    if context.marked.offload:
        context.streams.synchronize()


def on_device(handle: FlatParamHandle, shard: Tensor) -> Tensor:
    """Return ``shard`` on the device: the same tensor, or a copy if offloaded."""
    return shard.to(handle.layout.device) if handle.layout.offload else shard
