"""A stream for copies between host and device, beside compute."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from composable_fsdp.comm.device import StreamEvent, current_stream, use_stream


class Lane:
    """Copies in the order of their calls; on a CPU they are done when a call returns.

    Memory belongs to compute, which allocates and frees it: the lane comes ``behind``
    compute before it touches new memory, and compute waits for the event of the last
    copy before it frees the memory. So nothing needs ``record_stream``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def behind(self) -> None:
        """Begin the next copy only behind what compute was given so far."""
        if self.stream is not None:
            self.stream.wait_stream(current_stream(self.device))

    def copy(self, *pairs: tuple[Tensor, Tensor]) -> StreamEvent | None:
        """Copy to the first of each pair; return the event that compute waits for."""
        with nullcontext() if self.stream is None else use_stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if self.stream is None:
            return None
        done = StreamEvent(self.device)
        done.record(self.stream)
        return done

    def finish(self) -> None:
        """Have the host wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()
