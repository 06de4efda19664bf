"""Which leaves a unit's modules show: the sharded ones or the full ones."""

from __future__ import annotations

from composable_fsdp.flat import storage
from composable_fsdp.flat.handle import FlatParamHandle


def use_full(handle: FlatParamHandle) -> None:
    """Put the full leaves into the modules. Their data must be there. Sends nothing."""
    for parameters, name, _, full in handle.swaps:
        parameters[name] = full
    handle.is_full = True


def use_sharded(handle: FlatParamHandle) -> None:
    """Put the sharded leaves, the original parameters, back. Sends nothing."""
    for parameters, name, sharded, _ in handle.swaps:
        parameters[name] = sharded
    handle.is_full = False


def allocate_full(handle: FlatParamHandle) -> None:
    """Give every ``full`` its memory, on the current stream."""
    for full in handle.gather_lists[0]:
        storage.allocate(full)
    handle.gathered = True


def free_full(handle: FlatParamHandle) -> None:
    """Take the memory of every ``full`` back.

    The sharded leaves must be in the modules already: a kernel on a freed leaf crashes.
    """
    for full in handle.gather_lists[0]:
        storage.free(full)
    handle.gathered = False


def allocate_reduce(handle: FlatParamHandle) -> None:
    """Give the reduce buffers their memory, on the current stream."""
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        storage.allocate(region.reduce_buffer)
    handle.reduce_is_allocated = True


def free_reduce(handle: FlatParamHandle) -> None:
    """Take the memory of the reduce buffers back, on the stream that allocated it."""
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        storage.free(region.reduce_buffer)


def forget_arrived(handle: FlatParamHandle) -> None:
    """Note that no gradient waits in the reduce buffers."""
    for region in handle.trainable:
        region.arrived[:] = bytes(len(region.arrived))
