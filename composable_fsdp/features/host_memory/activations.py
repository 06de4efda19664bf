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

from composable_fsdp.comm.device import NO_EVENTS, StreamEvent
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

    def _pack(self, tensor: Tensor) -> Tensor | tuple[_Block, int]:
        """Begin the copy to the host; a tensor that wraps others stays.

        So do parameters, which a copy frees no memory of. Units free theirs after the
        forward, without regard to the lane, and fill them again for backward.
        """
        whole = tensor if tensor._base is None else tensor._base
        wraps = hasattr(type(tensor), "__tensor_flatten__")
        if wraps or isinstance(whole, nn.Parameter):
            return tensor
        if tensor.device not in self.blocks:
            self.blocks[tensor.device] = _Block(tensor.device)
        return self.blocks[tensor.device].save(tensor)

    def __exit__(self, *error: object) -> None:
        """End the block: those before the last two leave the device."""
        super().__exit__(*error)
        while self.blocks:
            self.blocks.popitem()[1].end()


@cache
def _trail(device: torch.device) -> tuple[Lane, list[weakref.ref[_Block]]]:
    """Return the lane of a device, and its last blocks, which have not left it."""
    return Lane(device), []


class _Block:
    """What a forward has saved on a device; the graph keeps it, by number."""

    def __init__(self, device: torch.device) -> None:
        self.lane, self.live = _trail(device)
        self.host: list[Tensor] = []
        self.here: dict[int, tuple[Tensor, int | None]] = {}
        """On the device, until the copies are out, and from when they come back until
        their use; with the version, None of a copy, which nobody else writes."""
        self.before: weakref.ref[_Block] | None = None
        """The block whose backward comes next."""
        self.done: StreamEvent = NO_EVENTS.gather
        """The end of the last copy; compute waits for it before it frees the memory."""

    def save(self, tensor: Tensor) -> tuple[_Block, int]:
        """Begin the copy of a tensor to the host."""
        # A forecast counts all memory but that of meta: there the host has none.
        home, at = "meta" if is_fake(tensor) else "cpu", len(self.host)
        host = torch.empty_like(tensor, device=home, pin_memory=tensor.is_cuda)
        self.host.append(host)
        self.here[at] = tensor.detach(), tensor._version
        if home == "cpu":
            self.done = self.lane.copy((host, tensor.detach()))
        return self, at

    def land(self) -> None:
        """Have compute wait for the copies of the block."""
        self.done.wait()

    # A block may go with its graph while the lane writes the memory.
    __del__ = land

    def take(self, at: int) -> Tensor:
        """Return a tensor on the device, and let go of it."""
        here, version = self.here.pop(at)
        # The copy may have seen the write.
        if version not in (None, here._version):
            raise RuntimeError(
                f"A tensor of shape {tuple(here.shape)} that an offloaded module needs "
                "for backward was written in place after it was saved. Write into a "
                "new tensor: y = y + z for y += z."
            )
        return here

    def end(self) -> None:
        """End the forward; the oldest block frees its memory on the device."""
        if self.live:
            self.before = self.live[-1]
        self.live.append(weakref.ref(self))
        if len(self.live) > _LIVE and (oldest := self.live.pop(0)()) is not None:
            oldest.land()
            for at in [*oldest.here]:
                oldest.take(at)

    def fetch(self) -> None:
        """Begin the copies to the device of what is on the host alone."""
        pairs = []
        for at, host in enumerate(self.host):
            if at not in self.here:
                here = torch.empty_like(host, device=self.lane.device)
                self.here[at] = here, None
                pairs.append((here, host))
        if pairs and not pairs[0][1].is_meta:
            self.done = self.lane.copy(*pairs)


def _unpack(saved: Tensor | tuple[_Block, int]) -> Tensor:
    """Return the tensor on the device; begin the copies of the block before."""
    if isinstance(saved, Tensor):
        return saved
    block, at = saved
    # At once only in a second backward, or one in another order.
    if at not in block.here:
        block.fetch()
    block.land()
    found = block.take(at)
    if block.before is not None and (before := block.before()) is not None:
        # Once: what is back, or was used, is on the device or has no backward left.
        block.before = None
        before.fetch()
    return found
