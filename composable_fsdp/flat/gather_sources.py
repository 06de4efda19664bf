"""What an all-gather reads in place of the shards: encoded shards, or pieces.

A *piece* holds the shards of several ranks, which are a slice of the full buffer, and
stays while that is freed. Pieces at rest are gathered from the shards after each
change; others are copied from the full buffers, from a forward to its backward. The
gather stream alone allocates, writes and reads them, so they need no event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import Waitable, copy_async, outside_transforms
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.operations import Operation
from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.memory import GatherSource
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.residency import shard_versions
from composable_fsdp.phases import BACKWARD_PRE
from composable_fsdp.planning.unit_plan import UnitPlan


class EncodedShards(GatherSource):
    """The source of all-gathers of a unit with wire formats."""

    __slots__ = ("_coded", "_work", "kept", "lists")

    def __init__(self, regions: Sequence[FlatParameter]) -> None:
        outputs = [region.full.buffer for region in regions]
        inputs = [region.shard for region in regions]
        self._coded: list[tuple[int, FlatParameter]] = []
        """The regions with a wire format, and their places in ``lists``."""
        self._work: Waitable
        for at, region in enumerate(regions):
            layout, own = region.layout, region.full.own_slice
            if layout.wire is not None:
                # Bytes of all ranks, in rank order, with this rank's slice.
                outputs[at] = memory.new_buffer(
                    layout.wire_nbytes, torch.uint8, region.device
                )
                with memory.outside_inference():
                    own = outputs[at].chunk(layout.world_size)[region.rank]
                memory.free(outputs[at])
                self._coded.append((at, region))
            if own is not None:
                inputs[at] = own
        self.kept = outputs
        self.lists = outputs, inputs

    # ``torch.func.vjp`` in a forward refuses writes to tensors from outside of it.
    @outside_transforms
    @torch.no_grad()
    def fill(
        self, context: Any, handle: FlatParamHandle
    ) -> tuple[list[Tensor], GroupRef | None]:
        """Encode the shards."""
        outputs, inputs = self.lists
        for at, region in self._coded:
            layout = region.layout
            assert layout.wire is not None
            memory.allocate(outputs[at])
            # An offloaded shard is encoded on the device, which is faster.
            shard = region.shard.to(region.device, non_blocking=True)
            layout.wire.encode(shard, inputs[at], layout.wire_layout, region.rank)
        for own_slice, shard in handle.form.fills:
            copy_async(own_slice, shard)
        return inputs, handle.groups.shard_ref

    def landing(
        self, handle: FlatParamHandle, work: Waitable | None
    ) -> Waitable | None:
        """Decode when ``work`` has ended: now if it is None, else at the wait."""
        if work is not None:
            self._work = work
            return self
        # On CUDA on the stream of the all-gather, whose event covers the decoding.
        self._decode()
        return None

    def wait(self) -> None:
        """Wait for the all-gather, and fill the full buffers."""
        self._work.wait()
        del self._work  # it may hold tensors
        self._decode()

    @outside_transforms
    @torch.no_grad()
    def _decode(self) -> None:
        """Fill the full buffers from the encoded values, and free these."""
        outputs = self.lists[0]
        for at, region in self._coded:
            layout = region.layout
            assert layout.wire is not None
            # Autograd saves views of ``full`` only from here on (``make_readable``), so
            # these writes invalidate no saved tensor.
            layout.wire.decode(outputs[at], region.full.buffer, layout.wire_layout)
            memory.free(outputs[at])

    def leave(self, handle: FlatParamHandle) -> None:
        """Give the encoded values other memory, but none until the next encoding."""
        outputs, inputs = self.lists
        for at, _ in self._coded:
            if memory.is_allocated(outputs[at]):
                outputs[at] = memory.leave(outputs[at], [inputs[at]])
                memory.free(outputs[at])

    def before_free(self, handle: FlatParamHandle) -> None:
        """Free the encoded values, which have memory if the all-gather has raised."""
        for at, _ in self._coded:
            memory.free(self.lists[0][at])


class Pieces(GatherSource):
    """The pieces of a form, of each region with elements."""

    __slots__ = (
        *("_filled_at", "_gathered_at", "_inputs", "_starts", "at_rest"),
        *("fills", "kept"),
    )

    def __init__(self, plan: UnitPlan, regions: Sequence[FlatParameter]) -> None:
        self.at_rest = plan.has_rest
        """Whether the pieces stay from step to step, and not only until backward."""
        self.kept = []
        """The buffers of the pieces; without memory at first."""
        self._starts: list[int] = []
        self._inputs: list[Tensor] = []
        """What an all-gather of pieces reads: the shard, or this rank's slice."""
        self.fills: tuple[tuple[Tensor, Tensor], ...] = ()
        """``FullForm.fills``: into the pieces if these stay, else into ``full``."""
        self._filled_at: tuple[int, ...] = ()
        """``shard_versions`` of the values in the pieces; empty: not to be used."""
        self._gathered_at: tuple[int, ...] = ()
        """``shard_versions`` at the last all-gather; empty if not to be copied."""
        for region in regions:
            numel, into = region.layout.shard_numel, region.full.own_slice
            shards = region.layout.world_size // plan.piece_ranks
            number, own = divmod(region.rank, shards)
            dtype, source = region.full.buffer.dtype, region.shard
            # The buffers outlive an inference mode of the caller.
            with memory.outside_inference():
                buffer = torch.empty(shards * numel, dtype=dtype, device=region.device)
                if self.at_rest and into is not None:
                    source = into = buffer[own * numel : (own + 1) * numel]
            memory.free(buffer)
            self.kept.append(buffer)
            self._starts.append(number * buffer.numel())
            self._inputs.append(source)
            if into is not None:
                self.fills += ((into, region.shard),)

    def fill(
        self, context: Any, handle: FlatParamHandle
    ) -> tuple[list[Tensor], GroupRef | None]:
        """Return the pieces and the group, or the shards, if no piece may be used.

        Collective: an all-gather of pieces at rest, unless they are filled.
        """
        self._gathered_at, now = (), shard_versions(handle)
        # A forward without a graph may follow a write that no version shows (averaged
        # weights, swapped in through ``.data``): it gathers, and leaves the pieces
        # unused.
        trains = torch.is_grad_enabled() and context.entered is not None
        usable = bool(context.tasks) or (self.at_rest and trains)
        if not usable or self._filled_at != now:
            if self.at_rest:
                for buffer in self.kept:
                    memory.allocate(buffer)
            for own, shard in self.fills:
                copy_async(own, shard)
            if not self.at_rest:
                return handle.form.gather_lists[1], handle.groups.shard_ref
            self._gather(handle)
            self._filled_at = now if trains else ()
        return self.kept, handle.groups.kept_ref

    def _gather(self, handle: FlatParamHandle) -> None:
        """Fill the pieces. Collective: an all-gather over the ranks of a piece."""
        ref, name = handle.groups.spread_ref, handle.full_fqn
        assert ref is not None
        operation = Operation(ref, "all_gather", name, handle.phase, self.kept)
        try:
            # The host waits on CPU: the next all-gather reads the pieces.
            collectives.all_gather_flat(
                self.kept, self._inputs, ref.get(), operation=operation
            )
        except BaseException:
            self.leave(handle)
            raise

    def landing(self, handle: FlatParamHandle, work: Waitable | None) -> Any:
        """Return ``work``: the all-gather fills the full buffers by itself."""
        self._gathered_at = shard_versions(handle)
        return work

    def leave(self, handle: FlatParamHandle) -> None:
        """Give the pieces other memory, but none until they are filled again."""
        self._filled_at = self._gathered_at = ()
        for at, (buffer, own) in enumerate(zip(self.kept, self._inputs, strict=True)):
            if memory.is_allocated(buffer):
                views = [part for part, _ in self.fills if part is own]
                self.kept[at] = memory.leave(buffer, views)
                memory.free(self.kept[at])

    def before_free(self, handle: FlatParamHandle) -> None:
        """Copy the pieces from the full buffers if backward awaits them, or free."""
        if self.at_rest:
            return
        if handle.phase is not BACKWARD_PRE or not self._gathered_at:
            self.drop()
            return
        self._filled_at = self._gathered_at
        fulls = handle.form.fulls
        for buffer, full, start in zip(self.kept, fulls, self._starts, strict=True):
            memory.allocate(buffer)
            copy_async(buffer, full[start : start + buffer.numel()])

    def drop(self) -> None:
        """Free the pieces, whose values must not be used any more."""
        self._filled_at = self._gathered_at = ()
        for buffer in self.kept:
            memory.free(buffer)
