"""What the runtime is measured against, and the ways to apply it.

The reference is the plain model: each rank's gradients are computed on it one after
the other, averaged, and given to the same optimizer. `train` does the same on a sharded
model with this rank's input only, so losses and state dicts can be compared bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp import (
    CustomPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
)
from composable_fsdp.doors.wrapping import post_order_apply
from tests.support.models import TinyGPT, module_at

PATHS = ("composable", "wrapper")
STYLES = ("manual", "auto", "hybrid")
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)

Input = Callable[[int, int], Tensor]
"""The input of (step, rank)."""
AnyInput = Callable[[int, int], Any]
"""The same for models that take more than a tensor."""
Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on one input."""
Optimize = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Clip = Callable[[nn.Module], object]


def apply_units(
    model: nn.Module,
    units: Sequence[str],
    *,
    path: str = "composable",
    style: str = "manual",
    **options: Any,
) -> nn.Module:
    """Make the modules at ``units`` and ``model`` itself fully sharded modules.

    ``manual``: one call per unit, inner ones first. ``auto``: one call with a policy.
    ``hybrid``: by policy on every other unit first, then by policy on the root.
    """
    chosen = [module_at(model, unit) for unit in units]
    early = {"manual": chosen, "auto": [], "hybrid": chosen[::2]}[style]
    policy = CustomPolicy(lambda module: any(module is each for each in chosen))
    if style != "manual":
        options["policy" if path == "composable" else "auto_wrap_policy"] = policy
    if path == "wrapper" and "strategy" in options:
        options["sharding_strategy"] = options.pop("strategy")

    def one(module: nn.Module, _: object = None) -> nn.Module:
        if path == "composable":
            return fully_shard(module, **options)
        return FullyShardedDataParallel(module, **options)

    post_order_apply(model, {module: {} for module in early}, one)
    return one(model)


def gpt_units(model: TinyGPT) -> list[str]:
    """Every block of a ``TinyGPT``."""
    return [f"blocks.{i}" for i in range(len(model.blocks))]


def gpt_input(step: int, rank: int) -> Tensor:
    """Token ids ``(2, 5)`` of (step, rank)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 17, (2, 5), generator=generator)


@cache
def wide_input(width: int) -> Input:
    """Inputs ``(2, width)`` of (step, rank)."""

    def make(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(2, width, generator=generator)

    return make


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A scalar that depends on every output."""
    loss: Tensor = model(x).float().square().mean()
    return loss


def backward(loss: Tensor) -> None:
    """``loss.backward()``, which has no types."""
    torch.autograd.backward(loss)


# In a group, because a model may have no parameters at all.
def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD([{"params": list(parameters)}], lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a large step, so that a wrong gradient shows soon.

    ``eps`` keeps it from blowing up gradients that are zero but for rounding, as that
    of the keys' bias is.
    """
    return torch.optim.AdamW([{"params": list(parameters)}], lr=0.05, eps=1e-3)


def clip_any(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip a model that may have no gradient at all, which is warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "clip_grad_norm_ found no gradient")
        return clip_grad_norm_(model, max_norm, norm_type)


def averaged_gradients(
    model: nn.Module, inputs: Sequence[Any], loss_of: Loss = loss_of
) -> list[float]:
    """Leave the mean of the gradients of ``inputs`` in ``.grad``; the losses."""
    losses = []
    sums: dict[nn.Parameter, Tensor] = {}
    for x in inputs:
        model.zero_grad()
        loss = loss_of(model, x)
        losses.append(loss.item())
        if loss.requires_grad:
            backward(loss)
        for p in model.parameters():
            if p.grad is not None:
                sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
    for p in model.parameters():
        p.grad = sums[p] / len(inputs) if p in sums else None
    return losses


def gradients_of(model: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mean of the gradients of ``inputs``, by name."""
    averaged_gradients(model, inputs)
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def train_reference(
    model: nn.Module,
    world_size: int,
    make_input: AnyInput,
    optimize: Optimize,
    *,
    steps: int = 3,
    clip: Clip | None = None,
    loss_of: Loss = loss_of,
) -> list[list[float]]:
    """Train the plain ``model`` on the inputs of all ranks; losses by step and rank."""
    optimizer = optimize(model.parameters())
    losses = []
    for step in range(steps):
        inputs = [make_input(step, rank) for rank in range(world_size)]
        losses.append(averaged_gradients(model, inputs, loss_of))
        if clip is not None:
            clip(model)
        optimizer.step()
    return losses


@cache
def trained_reference(
    build: Callable[..., nn.Module],
    world_size: int,
    make_input: AnyInput,
    optimize: Optimize,
    *,
    steps: int = 3,
    **options: Any,
) -> tuple[nn.Module, list[list[float]]]:
    """`train_reference` of ``build(**options)``: the trained model, and the losses.

    Once in a process, as many tests compare with the same. Equal calls must build equal
    models, and nobody may change the one that is returned.
    """
    model = build(**options)
    return model, train_reference(model, world_size, make_input, optimize, steps=steps)


def train(
    model: nn.Module,
    rank: int,
    make_input: AnyInput,
    optimize: Optimize,
    *,
    steps: int = 3,
    clip: Clip | None = None,
    loss_of: Loss = loss_of,
) -> list[float]:
    """Train ``model`` on the inputs of ``rank``; its losses by step."""
    optimizer = optimize(model.parameters())
    losses = []
    for step in range(steps):
        loss = loss_of(model, make_input(step, rank))
        losses.append(loss.item())
        if loss.requires_grad:
            backward(loss)
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(
    ours: dict[str, Tensor], reference: dict[str, Tensor]
) -> dict[str, float]:
    """Per name, the largest difference where the two are not bitwise equal."""
    assert list(ours) == list(reference)
    return {
        name: (value.double() - reference[name].double()).abs().max().item()
        for name, value in ours.items()
        if not torch.equal(value, reference[name])
    }


def assert_same_training(
    model: nn.Module,
    reference: nn.Module,
    losses: Sequence[float],
    expected: Sequence[float],
    *,
    tolerance: float = 0.0,
) -> None:
    """State dicts and losses are equal, bit by bit unless there is a ``tolerance``.

    Collective: those of ``state_dict()``.
    """
    found = differences(model.state_dict(), reference.state_dict())
    apart = [abs(a - b) / (1 + abs(b)) for a, b in zip(losses, expected, strict=True)]

    assert all(value <= tolerance for value in found.values()), found
    assert all(value <= tolerance for value in apart), (losses, expected)


def tolerance_at(world_size: int) -> float:
    """Sums of two are commutative; of more, their order is the backend's."""
    return 0.0 if world_size <= 2 else 1e-5


def mean_of_summed_grads(
    model: nn.Module, data: Callable[[int, int], Tensor], *, ranks: int = 2
) -> list[Tensor]:
    """Gradients of trainable parameters: of two batches per rank, added, then averaged.

    Each rank adds its batches first, as under ``no_sync``, so the bits are the same.
    """
    sums = []
    for rank in range(ranks):
        model.zero_grad()
        for step in range(2):
            backward(loss_of(model, data(step, rank)))
        sums.append([p.grad for p in model.parameters() if p.grad is not None])
    return [sum(each[1:], each[0]) / ranks for each in zip(*sums, strict=True)]
