"""Encode the shards of a unit before an all-gather, and decode the gathered bytes.

::

    CPU     unshard: encode, send          wait_unsharded: wait, decode
    CUDA    gather stream: encode | all-gather | decode | event

The encoded values have memory from the encoding to the decoding.
"""

from __future__ import annotations

import torch

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.comm.sequence import Operation
from composable_fsdp.comm.wire_format import largest_magnitudes
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter


# ``torch.func.vjp`` in a forward refuses writes to tensors from outside of it.
@outside_transforms
@torch.no_grad()
def encode_shards(handle: FlatParamHandle) -> None:
    """Write the shards of regions with a wire format into this rank's slices.

    Collective: an all-reduce over the shard group per region whose format needs the
    largest magnitudes; else none.
    """
    for region in handle.layout.regions:
        wire, layout = region.full.wire, region.layout
        if wire is None:
            continue
        assert layout.wire is not None
        memory.allocate(wire.buffer)
        # An offloaded shard is encoded on the device, which is faster than the host.
        shard = region.shard.to(region.device, non_blocking=True)
        largest = None
        if layout.wire.needs_maximum:
            largest = _largest(handle, region, shard)
        layout.wire.encode(shard, wire.own, layout.wire_layout, region.rank, largest)


def _largest(
    handle: FlatParamHandle, region: FlatParameter, shard: torch.Tensor
) -> torch.Tensor:
    """Return the largest magnitudes of the matrices over all ranks."""
    found = largest_magnitudes(shard, region.layout.wire_layout, region.rank)
    ref = handle.groups.shard_ref
    if ref is not None:
        # Computed anew for each all-gather: between two of them a user may have
        # written to the shards.
        collectives.all_reduce(
            found,
            ref.ref() or ref.get(),
            maximum=True,
            operation=Operation(
                ref.operations, "all_reduce", handle.full_fqn, handle.phase, found
            ),
        )
    return found


@outside_transforms
@torch.no_grad()
def decode_full(handle: FlatParamHandle) -> None:
    """Fill the full buffers from the encoded values, and free these.

    Nothing happens if the values are decoded already.
    """
    for region in handle.layout.regions:
        wire, layout = region.full.wire, region.layout
        # On CUDA the all-gather's stream has decoded.
        if wire is None or not memory.is_allocated(wire.buffer):
            continue
        assert layout.wire is not None
        # Autograd saves views of ``full`` only from here on (``make_readable``), so
        # these writes invalidate no saved tensor.
        layout.wire.decode(wire.buffer, region.full.buffer, layout.wire_layout)
        memory.free(wire.buffer)


def drop_encoded(handle: FlatParamHandle) -> None:
    """Free the encoded values of a unit that was gathered ahead and not used.

    The all-gather must have ended.
    """
    for region in handle.layout.regions:
        # Decoded values have freed this memory already, and nothing happens.
        if region.full.wire is not None:
            memory.free(region.full.wire.buffer)
