"""Activations in host memory between forward and backward.

::

    compute  forward 0  forward 1  forward 2     backward 2  backward 1  backward 0
    lane                out 0      out 1  out 2  in 1        in 0

What autograd saves in a block goes out on a stream of its own. It comes back one block
ahead of its use, in the opposite order of the forwards, so that at most two blocks are
on the device. The blocks of the end have not left yet when their backward comes.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks

from composable_fsdp.comm.device import StreamEvent
from composable_fsdp.features.host_memory.lane import Lane

_LIVE = 2
"""Blocks that are on the device at a time."""


class offloaded(saved_tensors_hooks):  # in lower case as the class of torch
    """``with offloaded():`` keeps what the block saves on the host until backward.

    Raises: RuntimeError, in backward as without offload, or when the block leaves the
        device, if what it saved was written in place.
    """

    def __init__(self) -> None:
        self.blocks: dict[torch.device, _Block] = {}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Begin the copy to the host; a tensor that wraps others stays.

        So do parameters, which a copy frees no memory of. Units free theirs after the
        forward, without regard to the lane, and fill them again for backward.
        """
        whole = tensor if tensor._base is None else tensor._base
        wraps = hasattr(type(tensor), "__tensor_flatten__")
        if wraps or isinstance(whole, nn.Parameter):
            return tensor
        if tensor.device not in self.blocks:
            self.blocks[tensor.device] = _Block(_trail(tensor.device))
        return self.blocks[tensor.device].save(tensor)

    def __exit__(self, *error: object) -> None:
        """End the block: those before the last two leave the device."""
        super().__exit__(*error)
        for block in self.blocks.values():
            block.trail.end(block)


class _Saved:
    """A tensor that autograd has saved in a block."""

    __slots__ = ("__weakref__", "block", "here", "host", "version")

    def __init__(self, block: _Block, tensor: Tensor, host: Tensor) -> None:
        self.block, self.host = block, host
        self.version: int | None = tensor._version
        """None of a copy, which nobody else writes."""
        self.here: Tensor | None = tensor
        """On the device: until the copy is out, and from when it is back."""

    def take(self) -> Tensor | None:
        """Return what is on the device, and let go of it."""
        here, self.here = self.here, None
        # The copy may have seen the write.
        if here is not None and self.version not in (None, here._version):
            raise RuntimeError(
                f"A tensor of shape {tuple(here.shape)} that an offloaded module needs "
                "for backward was written in place after it was saved. Write into a "
                "new tensor: y = y + z for y += z."
            )
        return here


class _Block:
    """What a forward has saved on a device."""

    def __init__(self, trail: _Trail) -> None:
        self.trail = trail
        self.saved: list[weakref.ref[_Saved]] = []
        self.before: weakref.ref[_Block] | None = None
        """The block whose backward comes next."""
        self.done: StreamEvent | None = None
        """The end of the last copy; compute waits for it before it frees the memory."""
        self.flight: list[Tensor] = []
        """Device memory that a copy may still use, whatever becomes of the graph."""

    def save(self, tensor: Tensor) -> _Saved:
        """Begin the copy of a tensor to the host."""
        # A forecast counts all memory but that of meta: there the host has none.
        home = "meta" if is_fake(tensor) else "cpu"
        host = torch.empty_like(tensor, device=home, pin_memory=tensor.is_cuda)
        saved = _Saved(self, tensor.detach(), host)
        if home == "cpu":
            self.trail.lane.behind()
            self.done = self.trail.lane.copy((host, tensor.detach()))
        self.flight.append(tensor)
        self.saved.append(weakref.ref(saved))
        return saved

    def land(self) -> None:
        """Have compute wait for the copies of the block."""
        if self.done is not None:
            self.done.wait()
        self.flight.clear()

    # A block may go with its graph while the lane writes the memory.
    __del__ = land

    def leave(self) -> None:
        """Free the memory on the device."""
        self.land()
        for saved in filter(None, (link() for link in self.saved)):
            saved.take()

    def fetch(self) -> None:
        """Begin the copies to the device of what is on the host alone."""
        lane, pairs = self.trail.lane, []
        for saved in filter(None, (link() for link in self.saved)):
            if saved.here is None:
                saved.here = torch.empty_like(saved.host, device=lane.device)
                pairs.append((saved.here, saved.host))
                saved.version = None
        if pairs:
            self.flight += [here for here, _ in pairs]
            lane.behind()
            if not pairs[0][1].is_meta:
                self.done = lane.copy(*pairs)


class _Trail:
    """The blocks of a device in the order of their forwards."""

    def __init__(self, device: torch.device) -> None:
        self.lane = Lane(device)
        self.live: list[weakref.ref[_Block]] = []
        """The last blocks, which have not left the device."""

    def end(self, block: _Block) -> None:
        """Add a block; the oldest leaves."""
        if self.live:
            block.before = self.live[-1]
        self.live.append(weakref.ref(block))
        if len(self.live) > _LIVE and (oldest := self.live.pop(0)()) is not None:
            oldest.leave()


_trail = cache(_Trail)


def _unpack(saved: Tensor | _Saved) -> Tensor:
    """Return the tensor on the device; begin the copies of the block before."""
    if isinstance(saved, Tensor):
        return saved
    block = saved.block
    # At once only in a second backward, or one in another order.
    if saved.here is None:
        block.fetch()
    block.land()
    found = saved.take()
    assert found is not None
    before = None if block.before is None else block.before()
    if before is not None:
        # Once: what is back, or was used, is on the device or has no backward left.
        block.before = None
        before.fetch()
    return found
