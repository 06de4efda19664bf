"""The reduce buffers of a unit: their memory, and which gradients are in them."""

from __future__ import annotations

from operator import or_

import torch

from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle


def allocate_reduce(handle: FlatParamHandle) -> None:
    """Allocate the reduce buffers on the current stream."""
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        memory.allocate(region.reduce_buffer)
    handle.reduce_has_memory = True


def free_reduce(handle: FlatParamHandle) -> None:
    """Free the reduce buffers, on the stream that allocated the buffers."""
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        memory.free(region.reduce_buffer)
    handle.reduce_has_memory = False


def zero_missing(handle: FlatParamHandle) -> None:
    """Zero the padding, and the parts of gradients that did not arrive."""
    # All views are collected first, so that a single call zeroes all of them.
    missing: list[torch.Tensor] = []
    for region in handle.trainable:
        missing.extend(region.gaps)
        if 0 in region.arrived:
            missing.extend(
                view
                for view, hit in zip(region.reduce_views, region.arrived, strict=True)
                if not hit and view.numel()
            )
    if missing:
        torch._foreach_zero_(missing)


def arrived_flags(handle: FlatParamHandle) -> tuple[bytes, ...]:
    """Return per region which leaves get a gradient from this reduction.

    Includes gradients of earlier reductions whose sums wait in ``partial``.
    """
    if handle.rule.fill:
        # With ``set_reduce_scatter_unused_params`` every parameter counts as arrived,
        # so that all ranks reduce the same parameters.
        arrived = tuple(bytes([1]) * len(r.arrived) for r in handle.trainable)
    else:
        arrived = tuple([bytes(region.arrived) for region in handle.trainable])
    if handle.held is not None:
        arrived = tuple(
            bytes(map(or_, now, earlier))
            for now, earlier in zip(arrived, handle.held, strict=True)
        )
    return arrived


def clear_arrived(handle: FlatParamHandle) -> None:
    """Record that no gradient waits for a reduction."""
    for region in handle.trainable:
        region.arrived[:] = bytes(len(region.arrived))


def add_waiting_to_reduce_buffers(handle: FlatParamHandle) -> None:
    """Copy waiting gradients that are views of ``full``, before ``full`` is freed.

    Does not write to the reduce buffers: the copies wait in ``FlatParameter.waiting``.
    """
    for region in handle.trainable:
        # A custom ``autograd.Function`` may return a saved weight as a gradient.
        begin = region.full.data_ptr()
        end = begin + region.full.nbytes
        # Tensor subclasses may have no data pointer; a subclass is never a view of
        # ``full``.
        plain = [each for each in region.waiting if each.__class__ is torch.Tensor]
        for place in map(torch.Tensor.data_ptr, plain):
            if begin <= place < end:
                region.waiting = [
                    None if each is None else each.clone() for each in region.waiting
                ]
                break
