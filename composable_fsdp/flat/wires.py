"""Encode the shards of a unit before an all-gather, and decode the gathered bytes.

On CUDA on the gather stream; the encoded values have memory until the decoding.
"""

from __future__ import annotations

import torch

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import Waitable, copy_async, outside_transforms
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.operations import Operation
from composable_fsdp.comm.wire_format import largest_magnitudes
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter


class EncodedShards:
    """The source of all-gathers of a unit with wire formats: a ``GatherSource``."""

    __slots__ = ()
    kept: tuple[torch.Tensor, ...] = ()

    def fill(
        self, context: object, handle: FlatParamHandle
    ) -> tuple[list[torch.Tensor], GroupRef | None]:
        """Encode the shards. Collective: as ``_encode_shards``."""
        _encode_shards(handle)
        for own_slice, shard in handle.form.fills:
            copy_async(own_slice, shard)
        return handle.form.gather_lists[1], handle.groups.shard_ref

    def landing(
        self, handle: FlatParamHandle, work: Waitable | None
    ) -> Waitable | None:
        """Decode when ``work`` has ended: now if it is None, else at the wait."""
        if work is not None:
            return _Decoding(handle, work)
        # On CUDA on the stream of the all-gather, whose event covers the decoding.
        _decode_full(handle)
        return None

    def before_free(self, handle: FlatParamHandle) -> None:
        """Free the encoded values, which have memory if the all-gather has raised."""
        _free_encoded(handle)

    def drop(self) -> None:
        """Do nothing: encoded values are not kept."""


# ``torch.func.vjp`` in a forward refuses writes to tensors from outside of it.
@outside_transforms
@torch.no_grad()
def _encode_shards(handle: FlatParamHandle) -> None:
    """Write the shards of regions with a wire format into this rank's slices.

    Collective: an all-reduce per region whose format needs the largest magnitudes.
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


class _Decoding:
    """An all-gather of encoded values; the wait also decodes."""

    __slots__ = ("_handle", "_work")

    def __init__(self, handle: FlatParamHandle, work: Waitable) -> None:
        self._handle, self._work = handle, work

    def wait(self) -> None:
        """Wait for the all-gather, and fill the full buffers."""
        self._work.wait()
        _decode_full(self._handle)


@outside_transforms
@torch.no_grad()
def _decode_full(handle: FlatParamHandle) -> None:
    """Fill the full buffers from the encoded values, and free these."""
    for region in handle.layout.regions:
        wire, layout = region.full.wire, region.layout
        if wire is None:
            continue
        assert layout.wire is not None
        # Autograd saves views of ``full`` only from here on (``make_readable``), so
        # these writes invalidate no saved tensor.
        layout.wire.decode(wire.buffer, region.full.buffer, layout.wire_layout)
    _free_encoded(handle)


def _free_encoded(handle: FlatParamHandle) -> None:
    """Free the encoded values of a unit, if it has any."""
    for region in handle.layout.regions:
        if region.full.wire is not None:
            memory.free(region.full.wire.buffer)
