"""How to train: one recipe, read by the sharded run and by the unsharded check."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

MAX_NORM = 1.0


@dataclass(frozen=True)
class Recipe:
    """Steps, sizes and seed; ``batch`` is that of one rank."""

    steps: int
    seed: int
    batch: int = 16
    context: int = 64
    peak: float = 3e-3
    warm_up: int = 20

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW; made after sharding, so that its state is this rank's share."""
        return torch.optim.AdamW(
            parameters, lr=self.peak, betas=(0.9, 0.98), weight_decay=0.05
        )

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Rise in a line, then fall along a cosine to a fiftieth."""
        if step < self.warm_up:
            share = (step + 1) / self.warm_up
        else:
            done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
            share = 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = self.peak * share
