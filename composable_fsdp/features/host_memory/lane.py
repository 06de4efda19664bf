"""A stream for copies between host and device, beside compute."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.comm.device import (
    NO_EVENTS,
    StreamEvent,
    current_stream,
    use_stream,
)


class Lane:
    """Copies in the order of their calls; on a CPU they are done when a call returns.

    Memory belongs to compute, which allocates and frees it: a copy comes behind what
    compute was given so far, and compute waits for the event of the last copy before it
    frees the memory. So nothing needs ``record_stream``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, *pairs: tuple[Tensor, Tensor]) -> StreamEvent:
        """Copy to the first of each pair; return the event that compute waits for."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return NO_EVENTS.gather
        self.stream.wait_stream(current_stream(self.device))
        with use_stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done = StreamEvent(self.device)
        done.record(self.stream)
        return done

    def finish(self) -> None:
        """Have the host wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()
