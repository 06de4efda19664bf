"""``offload_states`` on a GPU: the bits of the plain optimizer, states not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.device_steps import world
from composable_fsdp.features import offload_states
from tests.gpu.counts import NEEDS_NCCL
from tests.gpu.test_sleep import Trainee, inputs, weights

SLEEP: Callable[[int], None] = vars(torch.cuda)["_sleep"]
pytestmark = NEEDS_NCCL


@pytest.mark.req("W-04")
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_steps_have_the_bits_of_the_plain_optimizer(fused: bool) -> None:
    """With copies that a busy compute stream is late for; states are pinned."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        ours, plain = Trainee(device), Trainee(device)
        for each in (ours, plain):
            params = each.model.parameters()
            each.optimizer = torch.optim.AdamW(params, lr=1e-3, fused=fused)
        offload_states(ours.optimizer, ours.model)
        for x in inputs(4):
            for each in (ours, plain):
                each.backward(x)
                SLEEP(10_000_000)
                each.optimizer.step()
                each.optimizer.zero_grad()
        assert all(map(torch.equal, weights(ours), weights(plain)))
        pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
        for mine, other in pairs:
            for key, value in ours.optimizer.state[mine].items():
                if value.dim():
                    assert value.is_pinned()
                    expected = plain.optimizer.state[other][key]
                    assert torch.equal(value.to(device), expected)


@pytest.mark.req("W-04")
def test_between_steps_no_state_is_on_the_device() -> None:
    """Two buffers during a step, and nothing after it."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        x = inputs(1)[0]
        trainee = Trainee(device)
        trainee.optimizer = torch.optim.AdamW(
            trainee.model.parameters(), lr=1e-3, fused=True
        )
        offload_states(trainee.optimizer, trainee.model)
        trainee.step(x)
        trainee.backward(x)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        trainee.optimizer.step()
        # A region: 1024 x 1025 elements of float32, and two states of each.
        largest = 2 * 4 * 1024 * 1025
        peak = torch.cuda.max_memory_allocated(device) - before
        assert 2 * largest <= peak <= 2.1 * largest + 2**20
        assert torch.cuda.memory_allocated(device) == before
