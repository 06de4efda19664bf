"""``checkpoint_wrapper(offload=True)`` on a GPU: the peak, and equal numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp.doors.checkpoint_wrapper import checkpoint_wrapper
from tests.gpu.counts import NEEDS_NCCL
from tests.support.reference import backward

SLEEP: Callable[[int], None] = vars(torch.cuda)["_sleep"]
WIDTH, ROWS, BLOCKS = 1024, 4096, 12
pytestmark = NEEDS_NCCL


class Late(nn.Module):
    """A block whose compute is late, so that a copy that waits for nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        SLEEP(1_000_000)
        return x + torch.tanh(self.up(x))


def run(*, offload: bool) -> tuple[list[Tensor], int]:
    """Gradients of two steps, and the peak of the second."""
    torch.manual_seed(0)
    blocks = [checkpoint_wrapper(Late(), offload=offload) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        backward(model(x).square().sum())
    assert x.grad is not None
    found = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.req("W-05")
def test_the_peak_is_that_of_two_blocks_and_the_numbers_are_equal() -> None:
    """Of twelve inputs eight at least leave the peak."""
    (mine, low), (expected, high) = run(offload=True), run(offload=False)
    assert all(map(torch.equal, mine, expected))
    assert high - low >= (BLOCKS - 4) * ROWS * WIDTH * 4
