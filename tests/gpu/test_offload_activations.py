"""``offload=True`` on a GPU: equal gradients beside copies that are late."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.device_steps import world
from composable_fsdp import fully_shard
from composable_fsdp.doors.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from tests.gpu.counts import NEEDS_NCCL
from tests.support.reference import backward

pytestmark = NEEDS_NCCL
WIDTH, ROWS = 1024, 8192


def run(offload: bool, saved: bool, x: Tensor) -> tuple[list[Tensor], int]:
    """Gradients, of a unit in each block, and the bytes between both passes."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(8):
        linear = nn.Linear(WIDTH, WIDTH, device=x.device)
        block: nn.Module = fully_shard(nn.Sequential(linear, nn.Tanh()))
        if saved:
            blocks.append(offload_wrapper(block) if offload else block)
        else:
            blocks.append(checkpoint_wrapper(block, offload=offload))
    model = fully_shard(nn.Sequential(*blocks))
    for _ in range(2):
        model.zero_grad()
        before = torch.cuda.memory_allocated(x.device)
        loss = model(x).square().mean()
        held = torch.cuda.memory_allocated(x.device) - before
        backward(loss)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], held


@pytest.mark.req("M-12")
@pytest.mark.parametrize("saved", [False, True], ids=["checkpoint", "saved"])
def test_gradients_are_those_without_offload(saved: bool) -> None:
    """Bit by bit, with at most two blocks' activations on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        (mine, held), (plain, more) = (run(each, saved, x) for each in (True, False))
        assert all(map(torch.equal, mine, plain))
        assert more - held >= 4 * x.nbytes
