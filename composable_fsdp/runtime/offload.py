"""Gradients on their way to the host, for units whose shards live there.

::

    reduce   [reduce-scatter k] [+ earlier] [copy to host k] [reduce-scatter k-1] ...
    host     ... issues, and waits for nothing ...    end of backward: one wait, .grad

A copy is ordered by the reduce stream alone, so the host has to be kept away from
``grad_shard`` while one is in flight. Two rules do that: the leaves show no gradient
until the host has waited, once, at the end of backward (FSDP1 set ``.grad`` before, and
an optimizer could read half a copy); and what the host does to ``grad_shard`` it does
before the first copy of a backward. Earlier gradients are added on the device, where
both halves of the sum are ordered by the stream. The tensors in between are allocated
and dropped on the reduce stream, so their memory is reused behind the copy;
``grad_shard`` is pinned, as the copy would be synchronous else, and made anew when it
was cleared, from torch's cache of such memory.

The other direction needs care too: a gather reads the shard behind the host's back.
Whoever writes shards on the host comes after a wait: optimizers after one of their own
(``comm.device``), our own functions after ``synchronize_copy_stream``. Nothing waits
for others that write after a forward with gradients that got no backward; use
``torch.no_grad``.
"""

from __future__ import annotations

from torch import Tensor, nn

from composable_fsdp.comm.device import copy_async, synchronize
from composable_fsdp.flat import memory
from composable_fsdp.flat.gradients import note_shown, own_gradients
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.runtime.user_hooks import call_post_hooks, show_flat_gradient
from composable_fsdp.tree.state import RuntimeContext


def start_d2h_grad_copies(
    region: FlatParameter, sums: Tensor, arrived: bytes, *, rows: bool
) -> None:
    """Issue the copy of ``sums`` ``(shard_numel,)`` to ``grad_shard``, added to it.

    Runs on the reduce stream. The leaves have no ``.grad`` from here to
    ``finish_d2h_grad_copies``.
    """
    if region.in_flight is None:
        region.in_flight = _take_gradients(region, rows=rows)
    grad_shard = region.grad_shard
    assert grad_shard is not None
    if any(region.in_flight):
        earlier = memory.new_buffer(sums.numel(), grad_shard.dtype, sums.device)
        copy_async(earlier, grad_shard)
        sums = earlier.add_(sums)
    copy_async(grad_shard, sums)
    for index, hit in enumerate(arrived):
        if hit:
            region.in_flight[index] = 1


def _take_gradients(region: FlatParameter, *, rows: bool) -> bytearray:
    """Take the leaves' gradients into ``grad_shard``; which leaves had one."""
    if region.flat is not None:
        held = bytearray([region.flat.grad is not None]) * len(region.leaves)
        if any(held):
            own_gradients(region, rows=rows)
            region.flat.grad = None
        return held
    held = bytearray(leaf.grad is not None for leaf in region.leaves)
    if any(held):
        region.owned = {
            i: leaf.grad
            for i, (leaf, view) in enumerate(
                zip(region.leaves, region.grad_views, strict=True)
            )
            if leaf.grad is not None and leaf.grad is not view is not None
        }
        own_gradients(region, rows=rows)
        for leaf in region.leaves:
            leaf.grad = None
    return held


def finish_d2h_grad_copies(context: RuntimeContext) -> None:
    """Wait until the gradients are on the host, and show them as ``.grad``.

    The one place where a step makes the CPU wait. It also waits for copies of shards to
    the device, which an optimizer is about to overwrite. Calls the hooks of leaves that
    got a gradient. Sends nothing.
    """
    if not context.offload:
        return
    synchronize(context.streams)
    hooked: list[nn.Parameter] = []
    for handle in context.handles:
        for region in handle.trainable:
            if region.in_flight is not None:
                landed, region.in_flight = region.in_flight, None
                if region.flat is not None:
                    show_flat_gradient(region, landed)
                else:
                    hooked += _show(region, landed)
    call_post_hooks(hooked)


def _show(region: FlatParameter, landed: bytearray) -> list[nn.Parameter]:
    """Set ``.grad``; returns the leaves it was set of."""
    shown = []
    note_shown(region, bytes(landed))
    owned, region.owned = region.owned, {}
    for i, (leaf, view, hit) in enumerate(
        zip(region.leaves, region.grad_views, landed, strict=True)
    ):
        if not hit:
            continue
        if leaf.grad is not None and view is not None:
            # The loss used the sharded parameter itself, beside its unit.
            view.add_(leaf.grad)
        leaf.grad = owned[i].copy_(view) if i in owned and view is not None else view
        shown.append(leaf)
    return shown


def drop_d2h_grad_copies(context: RuntimeContext) -> None:
    """Wait for gradients that are on their way to the host and forget them."""
    if not context.offload:
        return
    synchronize(context.streams)
    for handle in context.handles:
        for region in handle.trainable:
            region.in_flight, region.owned = None, {}


def synchronize_copy_stream(context: RuntimeContext) -> None:
    """Let the host write shards: no copy to the device reads them any more."""
    if context.offload:
        synchronize(context.streams)


def on_device(handle: FlatParamHandle, shard: Tensor) -> Tensor:
    """``shard`` where collectives take it: itself, or a copy if it is offloaded."""
    return shard.to(handle.device) if handle.offload else shard
