"""Models that users of sharding libraries report as slow, beside FSDP2.

*tiny units*: 200 units of 1 to 1,000 floats, so a step is nothing but host time.
*experts*: four layers of width 1,024 with 32 experts each. *small weights*: 1,000
weights of 64 to 1,063 floats in ten units; look at the time of AdamW::

    python -m benchmarks.complaints                  # one GPU, a minute
    python -m benchmarks.complaints --device cpu     # the same models on the CPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.device_steps import Trainee, shard, times_in_turn, world
from benchmarks.tables import say_versions, table

NAMES = ("plain", "fsdp2", "ours")


class Scales(nn.Module):
    """A unit of one-dimensional weights, of the lengths given."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(length) for length in lengths)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by one and the means of the weights."""
        for weight in self.weights:
            x = x * (weight.mean() + 1)
        return x


class Experts(nn.Module):
    """A layer of experts, each of which takes an equal share of the tokens."""

    def __init__(self, width: int, number: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Parameter(torch.randn(number, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(number, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(tokens, width)`` to the same; experts divide the tokens."""
        y = self.norm(x).view(self.up.shape[0], -1, x.shape[-1])
        return x + torch.bmm(torch.bmm(y, self.up).relu(), self.down).view(x.shape)


def tiny_units() -> nn.Sequential:
    """200 units."""
    return nn.Sequential(*(Scales([1 + 999 * i // 199]) for i in range(200)))


def experts() -> nn.Sequential:
    """Four layers of 32 experts."""
    return nn.Sequential(*(Experts(1024, 32, 2048) for _ in range(4)))


def small_weights() -> nn.Sequential:
    """Ten units of a hundred weights."""
    lengths = [range(64 + 100 * i, 164 + 100 * i) for i in range(10)]
    return nn.Sequential(*(Scales(each) for each in lengths))


CASES = {"tiny units": tiny_units, "experts": experts, "small weights": small_weights}


def trainee(name: str, model: nn.Sequential, device: torch.device) -> Trainee:
    """A model whose children are the units, sharded by ``name``."""
    model.to(device)
    shard(name, model, model, device)
    tokens = 2048 if device.type == "cuda" else 32
    example = torch.randn(tokens, 1024, device=device, dtype=torch.bfloat16)
    return Trainee(model, example)


def run(device: torch.device, rounds: int) -> None:
    """Print one table: each case and way, in milliseconds and beside FSDP2."""
    rows = []
    with world("fake", device):
        for case, make in CASES.items():
            makers = {n: partial(trainee, n, make(), device) for n in NAMES}
            times = times_in_turn(makers, device, rounds)
            plain, peer = times["plain"], times["fsdp2"]
            for name, (compute, step) in times.items():
                added = [compute - plain[0], step - compute]
                base = [peer[0] - plain[0], peer[1] - peer[0]]
                ratios = (f"{a / b:.3f}" for a, b in zip(added, base, strict=True))
                cells = (f"{compute:.2f}", f"{step - compute:.2f}", *ratios)
                rows.append((f"{case}, {name}", *cells))
    table(
        f"Reported as slow: milliseconds, bf16, rank 0 of 8, median of {rounds}",
        ("", "forward+backward", "AdamW", "added, of fsdp2's", "AdamW, of fsdp2's"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.complaints")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--rounds", type=int, default=20, help="timed steps of each way (20)")
    options = parser.parse_args(arguments)
    say_versions("")
    run(torch.device(options.device), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
