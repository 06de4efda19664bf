"""``capture`` on a GPU: replays with the numbers of eager steps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_steps import BF16, world
from composable_fsdp import clip_grad_norm_, fully_shard
from composable_fsdp.features.captured_step import WARM_UP, capture
from tests.gpu.counts import NEEDS_NCCL
from tests.support.models import tiny_mlp
from tests.support.reference import backward

pytestmark = NEEDS_NCCL


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
