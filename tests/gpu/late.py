"""Models whose streams are late, and steps of them, for tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard, no_sync
from composable_fsdp.runtime import reduce, unshard
from tests.support.models import TinyGPT

LONG = 2_000_000
"""Cycles of a delay: about a millisecond."""


@contextmanager
def delayed(wait: Callable[[], int]) -> Iterator[None]:
    """Before each gather and each reduction its stream waits for so many cycles."""
    reducing: Any = reduce  # a name that the module imports
    gather, issue = unshard._gather, reducing._issue

    def slow_gather(*args: Any, **kwargs: Any) -> Any:
        sleep(wait())
        return gather(*args, **kwargs)

    def slow_issue(*args: Any, **kwargs: Any) -> Any:
        sleep(wait())
        return issue(*args, **kwargs)

    unshard._gather, reducing._issue = slow_gather, slow_issue
    try:
        yield
    finally:
        unshard._gather, reducing._issue = gather, issue


def sleep(cycles: int) -> None:
    if cycles:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch


class Slow(torch.autograd.Function):
    """Passes a tensor on; the stream that computes waits, each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[], int]) -> Tensor:
        """Equal values."""
        ctx.wait = wait
        sleep(wait())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.wait())
        return grads[0].clone(), None


def slow_compute(units: Iterable[nn.Module], wait: Callable[[], int]) -> None:
    """Delay the compute stream before each unit, forward and backward."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (Slow.apply(args[0], wait), *args[1:])  # type: ignore[no-untyped-call]  # torch

    for unit in units:
        unit.register_forward_pre_hook(before)


def gpt(device: torch.device, **options: Any) -> Any:
    """Three blocks and a root, on one rank."""
    model: Any = TinyGPT(layers=3).to(device)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, device: torch.device, steps: int = 4) -> list[Tensor]:
    """Steps of which each second accumulates first; the losses, then the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tokens = torch.arange(12, device=device).view(2, 6)
    losses = []
    for step in range(steps):
        if step % 2:
            with no_sync(model):
                model(tokens).float().square().mean().backward()
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]
