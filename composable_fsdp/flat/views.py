"""Which leaves a unit's modules show, and which of its buffers have memory."""

from __future__ import annotations

from operator import or_

import torch

from composable_fsdp.flat import memory
from composable_fsdp.flat.functional_params import (
    restore_functional_params,
    save_functional_params,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.part_guards import REFUSE, refuse_part


def use_full(handle: FlatParamHandle) -> None:
    """Put the full leaves into the modules. Their data must be there. Sends nothing.

    Where a module shows another tensor than its sharded leaf, that stays until
    ``use_sharded``: ``torch.func.functional_call`` put it there, for this call.

    Raises: CompositionError, if such a tensor has not the shape of the full parameter.
    """
    for table, key, sharded, full in zip(
        handle.tables,
        handle.keys,
        handle.sharded_placed,
        handle.full_placed,
        strict=True,
    ):
        # Not by a method: one more call for each place in every step.
        if key not in table or table[key] is not sharded:
            save_functional_params(handle)
            break
        table[key] = full
    handle.is_full = True


def use_sharded(handle: FlatParamHandle) -> None:
    """Put the sharded leaves, the original parameters, back. Sends nothing."""
    for table, key, sharded in zip(
        handle.tables, handle.keys, handle.sharded_placed, strict=True
    ):
        table[key] = sharded
    if handle.foreign:
        restore_functional_params(handle)
    if handle.parts_open:  # as close_parts, without its call
        for hooks in handle.guards:
            hooks[REFUSE] = refuse_part
        handle.parts_open = False
    handle.is_full = False


def allocate_full(handle: FlatParamHandle) -> None:
    """Give every ``full`` its memory, on the current stream."""
    for full in handle.gather_lists[0]:
        memory.allocate(full)
    handle.gathered = True


def free_full(handle: FlatParamHandle) -> None:
    """Take the memory of every ``full`` back.

    The sharded leaves must be in the modules already: a kernel on a freed leaf crashes.
    """
    for full in handle.gather_lists[0]:
        memory.free(full)
    handle.gathered = False


def allocate_reduce(handle: FlatParamHandle) -> None:
    """Give the reduce buffers their memory, on the current stream."""
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        memory.allocate(region.reduce_buffer)
    handle.reduce_has_memory = True


def free_reduce(handle: FlatParamHandle) -> None:
    """Take the memory of the reduce buffers back, on the stream that allocated it."""
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        memory.free(region.reduce_buffer)
    handle.reduce_has_memory = False


def zero_missing(handle: FlatParamHandle) -> None:
    """Zero the padding and the slots of gradients that did not arrive, in one call."""
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
    """Per region, which leaves get a gradient: by this reduction or one held back."""
    if handle.rule.fill:
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
    """Note that no gradient waits in the reduce buffers."""
    for region in handle.trainable:
        region.arrived[:] = bytes(len(region.arrived))


def add_waiting_to_reduce_buffers(handle: FlatParamHandle) -> None:
    """Copy gradients that wait and are the weights' memory, before that is freed.

    A custom ``autograd.Function`` may return what it saved.
    """
    for region in handle.trainable:
        begin = region.full.data_ptr()
        end = begin + region.full.nbytes
        # Others than plain tensors may have no place, and none of them is a view.
        plain = [each for each in region.waiting if each.__class__ is torch.Tensor]
        for place in map(torch.Tensor.data_ptr, plain):
            if begin <= place < end:
                region.waiting = [
                    None if each is None else each.clone() for each in region.waiting
                ]
                break
