"""On a GPU: compiled models, graphs of ``torch.compile``, and fp16 with a scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.device_steps import BF16, world
from composable_fsdp import MixedPrecision, ShardedGradScaler
from composable_fsdp.features import Arena
from tests.gpu.counts import NEEDS_NCCL
from tests.gpu.late import gpt

HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)

pytestmark = NEEDS_NCCL


def losses_of(
    model: Callable[..., Any],
    parameters: nn.Module,
    device: torch.device,
    scaler: ShardedGradScaler | None = None,
) -> list[float]:
    """The losses of five steps of ``model``."""
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1)
    tokens = torch.arange(12, device=device).view(2, 6)
    losses = []
    for _ in range(5):
        loss = model(tokens).float().square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_place(model: Any, mode: str) -> Callable[..., Any]:
    """Compile each block."""
    for block in model.blocks:
        block.compile(mode=mode)
    return model  # type: ignore[no-any-return]


def as_a_whole(model: Any, mode: str) -> Callable[..., Any]:
    return torch.compile(model, mode=mode)


@pytest.mark.parametrize("compiled", [in_place, as_a_whole], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("mode", "arena"),
    [("default", None), ("reduce-overhead", Arena())],
    ids=["default", "graphs"],
)
def test_compiled_models_train_as_eager_ones(
    device: torch.device,
    mode: str,
    arena: Arena | None,
    compiled: Callable[..., Callable[..., Any]],
) -> None:
    """With CUDA graphs full parameters stay at their addresses, in an arena."""
    with world("one", device):
        torch.manual_seed(0)
        eager = gpt(device, mixed_precision=BF16)
        expected = losses_of(eager, eager, device)
        torch.manual_seed(0)
        model = gpt(device, mixed_precision=BF16, arena=arena)
        found = losses_of(compiled(model, mode), model, device)

    assert found == pytest.approx(expected, abs=2e-3)
    assert found[-1] < found[0] / 2


def test_fp16_with_a_scaler_trains_as_fp32(device: torch.device) -> None:
    """Gradients are scaled, and the scale is taken out before the step."""
    with world("one", device):
        torch.manual_seed(0)
        plain = gpt(device)
        expected = losses_of(plain, plain, device)
        torch.manual_seed(0)
        model = gpt(device, mixed_precision=HALF)
        found = losses_of(model, model, device, ShardedGradScaler())

    assert found == pytest.approx(expected, abs=2e-3)
    assert found[-1] < found[0] / 2
