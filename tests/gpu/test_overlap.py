"""On a GPU: constant peaks, overlap in a trace, numbers under delayed streams, bf16.

One rank sends nothing, but its casts and copies go by the side streams as a collective
would; and with torch's ``fake`` backend an all-gather copies on the gather stream.
Delays (kernels that only wait) stand for a network: real work behind them is then
ordered by events alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.device_steps import BF16, Chain, chain_peaks, world
from benchmarks.trace import StreamUse, record, stream_uses
from composable_fsdp import BackwardPrefetch, CPUOffload, fully_shard
from composable_fsdp.features import Arena
from tests.gpu.counts import NEEDS_NCCL
from tests.gpu.late import LONG, delayed, gpt, sleep, slow_compute, train
from tests.support.reference import backward

pytestmark = [
    *NEEDS_NCCL,
    # Torch says so once in a process, of nodes that are kept alive, as ours are.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

PRE, POST = BackwardPrefetch


@pytest.mark.req("U-03")
@pytest.mark.parametrize("kind", ["one", "fake"])
def test_the_peak_of_a_step_is_constant_and_planned(
    device: torch.device, kind: str
) -> None:
    """Over 20 steps, by the bytes that tensors asked for; the plan's formula but for
    activations."""
    with world(kind, device) as size:
        found, planned = chain_peaks(2048, device, size, steps=20)

    assert found.varies == 0
    assert found.most == pytest.approx(planned.total, rel=0.01)


def uses_of(
    device: torch.device, mode: BackwardPrefetch | None, *, in_forward: bool
) -> list[StreamUse]:
    """Streams of a forward, or a backward, whose compute and gathers take long."""
    with world("fake", device):
        model = Chain(64, device)
        for layer in model.layers:
            fully_shard(layer, backward_prefetch=mode)
        fully_shard(model, backward_prefetch=mode)
        slow_compute(model.layers, lambda: LONG)
        row = model.row.clone().requires_grad_()
        with delayed(lambda: LONG // 2):
            for _ in range(3):
                model(row).sum().backward()
            step = (lambda: model(row)) if in_forward else model(row).sum().backward

            def behind_host() -> None:
                # The host gives all streams their work meanwhile, however slow it is.
                sleep(100 * LONG)
                step()

            return stream_uses(record(behind_host, device))


@pytest.mark.req("S2-03")
@pytest.mark.parametrize("in_forward", [True, False])
def test_a_trace_shows_that_collectives_run_beside_compute(
    device: torch.device, in_forward: bool
) -> None:
    """Of what the side streams do more than half runs while compute is busy: each
    stream's share is at least that."""
    compute, *side = uses_of(device, PRE, in_forward=in_forward)

    assert side
    assert sum(use.hidden for use in side) > 0.5 * sum(use.busy for use in side)
    assert all(use.hidden <= compute.busy for use in side)


@pytest.mark.req("M-07")
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("mode", [PRE, POST, None])
@pytest.mark.parametrize("seed", range(3))
def test_streams_that_are_late_by_chance_change_no_number(
    device: torch.device,
    seed: int,
    mode: BackwardPrefetch | None,
    limited: bool,
    host: bool,
) -> None:
    """Bit by bit the same losses and weights: whatever is shared is ordered by events,
    and no memory is used again too early."""
    options: dict[str, Any] = {
        "backward_prefetch": mode,
        "forward_prefetch": seed % 2 == 0,
        "limit_all_gathers": limited,
        "mixed_precision": BF16,
        "cpu_offload": CPUOffload(offload_params=True) if host else None,
        "arena": Arena(poison=True, shared=mode is PRE) if seed == 2 else None,
    }
    chance = random.Random(seed)

    def wait() -> int:
        return chance.choice([0, 0, LONG // 20, LONG // 2])

    with world("one", device):
        expected = train(gpt(device, **options), device)
        late = gpt(device, **options)
        slow_compute(late.blocks, wait)
        with delayed(wait):
            found = train(late, device)

    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


# ---- callers on streams of their own, and optimizers between two backwards ----


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
