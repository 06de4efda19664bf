"""One line per step: loss, speed, use of the hardware, memory, waits for data."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.settings import units_of
from composable_fsdp.naming import size_text
from composable_fsdp.tools.plan import plan

_PEAKS = {"B200": 2.25e15, "H200": 9.89e14, "H100": 9.89e14, "A100": 3.12e14}
"""Dense operations per second in bfloat16, by a part of the name of the GPU."""


class StepLog:
    """Writes a line per ``every`` steps, on rank 0.

    Sends nothing between ranks: loss and memory are those of this rank, and the speed
    counts as many tokens for each rank over which the model is sharded. The loss is
    read, which waits for the GPU, when a line is due.

    Args:
        model: A model with a fully sharded unit.
        every: Steps per line. Default 1. The first line counts what a program does
            once, such as compiling.
        write: A function of the line. Default ``print``; beside a bar ``tqdm.write``.
        json_lines: A file, to which a JSON object per line is added. Default None.
        to: TensorBoard's ``SummaryWriter``, runs of W&B, or functions of the values.
            Default none.
        flops_per_token: Floating point operations of forward and backward per token.
            Default None: 6 per parameter of the plan, without scores of attention.
        peak_flops: Those that a device can do in a second. Default None: of an A100,
            H100, H200 or B200 in bfloat16; for other devices no MFU is given.

    Raises: TypeError or CompositionError, unless ``model`` has units.

    >>> from composable_fsdp.features import StepLog
    >>> log = StepLog(model, every=10)
    >>> for batch in log.timed(loader):
    ...     values = log.step(loss_of(batch), tokens=batch.numel())
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        write: Callable[[str], object] = print,
        json_lines: str | os.PathLike[str] | None = None,
        to: Sequence[Any] = (),
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._device = units_of(model, "StepLog", recurse=True)[0].device
        self._every, self._write, self._json, self._to = every, write, json_lines, to
        planned, gpu = plan(model), self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if gpu else ""
        known = (peak for part, peak in _PEAKS.items() if part in name)
        self._ranks = planned.world_size
        self._flops = flops_per_token or 6.0 * planned.whole_numel
        self._peak = (peak_flops or next(known, 0.0)) * dist.get_world_size()
        self._is_first = dist.get_rank() == 0
        self._steps, self._tokens, self._waited = 0, 0, 0.0
        self._since = time.perf_counter()

    def timed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader``, and count the time that they take."""
        began = time.perf_counter()
        for batch in loader:
            self._waited += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block, such as an evaluation, out of the line."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def step(
        self, loss: Tensor | float, tokens: int, **more: float
    ) -> dict[str, float] | None:
        """Count a step of ``tokens`` tokens on this rank; ``more`` joins the line.

        Returns: the values, in seconds, bytes and shares of 1, if a line is due.
        """
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if self._steps % self._every:
            return None
        value = loss.item() if isinstance(loss, Tensor) else loss  # waits for the GPU
        values = {"step": self._steps, "loss": value}
        seconds = time.perf_counter() - self._since
        speed = values["tokens_per_second"] = self._tokens * self._ranks / seconds
        if self._peak:
            values["mfu"] = speed * self._flops / self._peak
        values["peak_bytes"], whole = _memory(self._device)
        values["peak_share"] = values["peak_bytes"] / whole
        values["data_seconds"] = self._waited / self._every
        values["step_seconds"] = seconds / self._every
        values.update(more)
        self._tokens, self._waited, self._since = 0, 0.0, self._since + seconds
        if not self._is_first:
            return values
        use = f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
        rest = "".join(f"  {name} {value:.4g}" for name, value in more.items())
        self._write(
            f"step {self._steps}  loss {values['loss']:.4f}  "
            f"{values['tokens_per_second']:,.0f} tokens/s{use}  "
            f"peak {size_text(int(values['peak_bytes']))} ({values['peak_share']:.1%})"
            f"  data {values['data_seconds'] * 1e3:.1f} ms{rest}"
        )
        if self._json is not None:
            with open(self._json, "a") as file:
                file.write(json.dumps(values) + "\n")
        for each in self._to:
            if hasattr(each, "add_scalar"):  # TensorBoard's takes one value at a time
                for name, value in values.items():
                    each.add_scalar(name, value, self._steps)
            else:
                getattr(each, "log", each)(values)
        return values


def _memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes held at most so far, and those of the GPU or the machine."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device), whole
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
