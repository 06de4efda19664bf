"""Copies of gradients to the host, for units with offloaded shards.

No parameter shows a copy until the host has waited, once, at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor, nn

from composable_fsdp.comm.device import copy_async
from composable_fsdp.flat import gradients, memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.tree.state import RuntimeContext


def start_d2h_grad_copies(region: FlatParameter, sums: Tensor, arrived: bytes) -> None:
    """Copy ``sums``, added to earlier gradients, to the host."""
    apart, into = None, region.gradient.shard
    assert into is not None
    if _shows_flat_gradient(region):
        # Earlier gradients are added on the device, where the stream orders both
        # operands. Temporary tensors are allocated and freed on that stream, so
        # their memory is reused only after the copy.
        earlier = memory.new_buffer(sums.numel(), into.dtype, sums.device)
        copy_async(earlier, into)
        sums = earlier.add_(sums)
        if not region.host_copies:
            # Shown again beside the sums, also those that get no gradient now.
            held = bytes([leaf.grad is not None for leaf in region.leaves])
            region.host_copies.append((None, held, False))
            for leaf in region.graded:
                leaf.grad = None
    elif region.host_copies or not gradients.are_cleared(region.graded):
        # Beside gradients of the user, to be added on the host.
        size, dtype = sums.numel(), sums.dtype
        apart = into = gradients.new_shard(size, dtype, region.device, offload=True)
    # Pinned memory on both sides: a copy to pageable memory would be synchronous.
    copy_async(into, sums)
    region.host_copies.append((apart, arrived, True))


def _shows_flat_gradient(region: FlatParameter) -> bool:
    """Return whether the flat gradient is ``.grad`` of every leaf, or is to become."""
    if region.host_copies:
        return all(apart is None for apart, *_ in region.host_copies)
    held = [leaf.grad for leaf in region.graded]
    shown: Sequence[Tensor | None] = region.gradient.views
    if region.flat is not None:
        shown = (region.gradient.shard, *[None] * len(region.leaves))
    return any(each is not None for each in shown) and all(map(is_, held, shown))


def finish_d2h_grad_copies(context: RuntimeContext) -> None:
    """Wait until the gradients are on the host, and set ``.grad``."""
    if not context.offload:
        return
    # The only point of a step at which the CPU waits. The wait includes copies of
    # shards to the device, which an optimizer is about to overwrite.
    context.streams.synchronize()
    hooked: list[nn.Parameter] = []
    for handle in context.handles:
        for region in handle.layout.trainable:
            copies, region.host_copies = region.host_copies, []
            for sums, arrived, is_new in copies:
                leaves = gradients.show_on_leaves(region, sums, arrived)
                hooked += leaves if is_new else ()
    # Of a unit that has reduced twice, once with the total.
    gradients.call_post_hooks(dict.fromkeys(hooked))


def drop_d2h_grad_copies(context: RuntimeContext) -> None:
    """Wait for the gradients that are being copied to the host, and discard them."""
    if not context.offload:
        return
    context.streams.synchronize()
    for handle in context.handles:
        for region in handle.layout.trainable:
            region.host_copies = []


def synchronize_copy_stream(context: RuntimeContext) -> None:
    """Wait until no copy to the device reads shards; the host may then write shards."""
    if context.offload:
        context.streams.synchronize()


def on_device(handle: FlatParamHandle, shard: Tensor) -> Tensor:
    """Return ``shard`` on the device: the same tensor, or a copy if offloaded."""
    return shard.to(handle.layout.device) if handle.layout.offload else shard
