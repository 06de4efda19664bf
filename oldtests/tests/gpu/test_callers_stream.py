"""On a GPU: callers on streams of their own, and optimizers between two backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.device_steps import BF16, world
from composable_fsdp import CPUOffload
from tests.gpu.counts import NEEDS_NCCL
from tests.gpu.late import LONG, delayed, gpt, sleep, train
from tests.support.reference import backward

pytestmark = [
    *NEEDS_NCCL,
    # Torch says so once in a process, of nodes that are kept alive, as ours are.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("built_there", [True, False])
def test_a_step_on_a_stream_of_the_caller_changes_no_number(
    device: torch.device, built_there: bool, host: bool
) -> None:
    """Forward, backward and optimizer; the model was built there, or on the usual
    stream, where hooks of leaves run then."""
    options: dict[str, Any] = {
        "mixed_precision": BF16,
        "cpu_offload": CPUOffload(offload_params=host),
    }
    with world("one", device):
        expected = train(gpt(device, **options), device)
        model = None if built_there else gpt(device, **options)
        usual = torch.cuda.current_stream(device)
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        own.wait_stream(usual)
        with torch.cuda.stream(own), delayed(lambda: LONG // 2):
            found = train(model or gpt(device, **options), device)
        usual.wait_stream(own)

    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def gradients_of_two_losses(device: torch.device, delay: int) -> list[Tensor]:
    """Two forwards, a backward, an optimizer that is late, and the other backward.

    A fused optimizer: autograd takes the writes of another one for an error, here as in
    a plain model.
    """
    model = gpt(device, mixed_precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    tokens = torch.arange(12, device=device).view(2, 6)
    first, second = (model(tokens + i).float().square().mean() for i in range(2))
    backward(first)
    sleep(delay)
    optimizer.step()
    if not delay:
        torch.cuda.synchronize(device)
    optimizer.zero_grad()
    backward(second)
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_backward_gathers_what_an_optimizer_wrote_since_its_forward(
    device: torch.device,
) -> None:
    """However late the optimizer is on its stream."""
    with world("one", device):
        expected = gradients_of_two_losses(device, 0)
        found = gradients_of_two_losses(device, 20 * LONG)

    assert len(found) > 0
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
