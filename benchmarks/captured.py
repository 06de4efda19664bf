"""A whole step in a CUDA graph: captured once, replayed, and compared with eager steps.

Some kernels add in an order that chance decides, so a second model that trains eagerly
tells how far equal runs come apart. On CPU the same steps run without a capture, to try
the code.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.device_steps import WARM_UP, Size, Timer, Trainee, block_trainee
from composable_fsdp.features.captured_step import capture


class Captured(NamedTuple):
    """Milliseconds of a step, and the largest differences of a weight at the end."""

    eager: float
    replayed: float
    difference: float
    """Of the model that trained by the graph from one that trained eagerly."""
    by_chance: float
    """Of two models that trained eagerly."""


def captured_step(size: Size, device: torch.device, rounds: int) -> Captured:
    """Train three equal models, one of them by a graph; the same number of steps."""
    eager, again, graphed = (_trainee(size, device) for _ in range(3))
    replay = capture(graphed.step)
    steps: list[Callable[[], object]] = [eager.step, again.step, replay]
    for step in steps:
        for _ in range(WARM_UP + 1):
            step()
    if device.type == "cuda":
        assert replay.captures == 1, replay.reason
    times = [_median(step, device, rounds) for step in steps]
    most = [_apart(eager, other) for other in (graphed, again)]
    return Captured(times[0], times[-1], *most)


def _apart(one: Trainee, other: Trainee) -> float:
    """The largest difference of a weight."""
    pairs = zip(_weights(one), _weights(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def _trainee(size: Size, device: torch.device) -> Trainee:
    """Ours, with an optimizer that keeps its step count on the device."""
    made = block_trainee("ours", size, device)
    made.optimizer = torch.optim.AdamW(
        made.model.parameters(), lr=1e-4, capturable=device.type == "cuda"
    )
    return made


def _weights(trainee: Trainee) -> list[Tensor]:
    return [p.detach() for p in trainee.model.parameters()]


def _median(step: Callable[[], object], device: torch.device, rounds: int) -> float:
    timer = Timer(device)
    timer.mark()
    for _ in range(rounds):
        step()
        timer.mark()
    return statistics.median(timer.intervals())
