"""On a GPU: compiled models, CUDA graphs, and fp16 with a scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.device_steps import BF16, world
from composable_fsdp import (
    MixedPrecision,
    ShardedGradScaler,
    clip_grad_norm_,
    fully_shard,
)
from composable_fsdp.features import Arena
from composable_fsdp.features.captured_step import WARM_UP, capture
from tests.gpu.counts import NEEDS_NCCL
from tests.gpu.late import gpt
from tests.support.models import tiny_mlp
from tests.support.reference import backward

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


# ---- captured steps ----


class Trainee:
    """A sharded model with AdamW and a step that clips."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = fully_shard(tiny_mlp().to(device), mixed_precision=BF16)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=torch.tensor(1e-2), capturable=True
        )

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).float().square().mean()
        backward(loss)
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.req("M-09")
def test_replays_have_the_losses_of_eager_steps() -> None:
    """Two shapes, two graphs; eight steps after the warm-up."""
    device = torch.device("cuda")
    with world("one", device):
        ours, eager = Trainee(device), Trainee(device)
        run = capture(ours.step)
        shapes = [3] * (WARM_UP + 4) + [5] * 4
        xs = [torch.randn(rows, 8, device=device) for rows in shapes]

        losses = [run(x) for x in xs]

        assert run.captures == 2, run.reason
        expected = torch.stack([eager.step(x) for x in xs])
        torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.req("M-09")
def test_a_step_that_waits_for_the_gpu_goes_on_eagerly() -> None:
    """``loss.item()`` cannot be captured; the next steps are right."""
    device = torch.device("cuda")
    with world("one", device):
        ours, eager = Trainee(device), Trainee(device)
        run = capture(lambda x: ours.step(x).item())
        xs = [torch.randn(3, 8, device=device) for _ in range(WARM_UP + 3)]

        losses = [run(x) for x in xs]

        assert run.reason is not None
        assert run.captures == 0
        assert losses == pytest.approx([eager.step(x).item() for x in xs], rel=1e-3)
