"""``sleep`` on a GPU: no memory of the model is left, and training goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.device_steps import BF16, world
from composable_fsdp import fully_shard
from composable_fsdp.features import (
    Arena,
    capture,
    offload_states,
    released,
    sleep,
    wake,
)
from composable_fsdp.features.captured_step import WARM_UP
from tests.gpu.counts import NEEDS_NCCL
from tests.support.reference import backward

pytestmark = NEEDS_NCCL
WIDTH = 1024


class Trainee:
    """Three units of more than a million elements each, with a buffer and AdamW."""

    def __init__(self, device: torch.device, arena: Arena | None = None) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH, device=device))
        for layer in layers:
            fully_shard(layer, mixed_precision=BF16, arena=arena)
        self.model = fully_shard(model, mixed_precision=BF16, arena=arena)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(1e-3), capturable=True
        )

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).float().square().mean()
        backward(loss)
        return loss.detach()

    def step(self, x: Tensor) -> Tensor:
        loss = self.backward(x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = (64, WIDTH)
    return [
        torch.randn(shape, device="cuda", generator=generator) for _ in range(count)
    ]


def weights(trainee: Trainee) -> list[Tensor]:
    return [p.detach().clone() for p in trainee.model.parameters()]


@pytest.mark.req("W-03")
@pytest.mark.parametrize("arena", [None, Arena()], ids=["plain", "arena"])
def test_a_sleeping_model_has_no_device_memory(arena: Arena | None) -> None:
    """``memory_allocated`` is as before the model, after a backward and after steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        x = inputs(1)[0]
        # Workspaces of cuBLAS, and communicators, which are no memory of a model.
        Trainee(device).step(x)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        trainee = Trainee(device, arena)
        sleep(trainee.model, trainee.optimizer)
        assert torch.cuda.memory_allocated(device) == before
        wake(trainee.model)
        for _ in range(3):
            trainee.step(x)
        trainee.backward(x)
        mine = weights(trainee)
        held = sum(each.nbytes for each in mine)
        with released(trainee.model, trainee.optimizer):
            assert torch.cuda.memory_allocated(device) == before + held
        assert all(map(torch.equal, mine, weights(trainee)))
        trainee.optimizer.step()


@pytest.mark.req("W-03")
@pytest.mark.parametrize("arena", [None, Arena()], ids=["plain", "arena"])
def test_training_goes_on_after_a_nap_with_equal_numbers(arena: Arena | None) -> None:
    """Bit by bit beside a model that never sleeps; gradients sleep, too."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        tired, other = Trainee(device, arena), Trainee(device)
        for x in inputs(4):
            assert torch.equal(tired.backward(x), other.backward(x))
            with released(tired.model, tired.optimizer):
                # The engine that generates meanwhile writes all the memory.
                torch.full((64 * 2**20,), float("nan"), device=device)
            for each in (tired, other):
                each.optimizer.step()
                each.optimizer.zero_grad()
        assert all(map(torch.equal, weights(tired), weights(other)))


@pytest.mark.req("W-03")
@pytest.mark.parametrize("arena", [None, Arena()], ids=["plain", "arena"])
def test_a_captured_step_goes_on_after_a_nap(arena: Arena | None) -> None:
    """Its graphs are captured again at the new addresses."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        ours, eager = Trainee(device, arena), Trainee(device)
        run = capture(ours.step, max_graphs=1)
        losses = []
        xs = inputs(2 * WARM_UP + 4)
        for at, x in enumerate(xs):
            if at == WARM_UP + 2:
                with released(ours.model, ours.optimizer, keep="none"):
                    held = torch.full((64 * 2**20,), float("nan"), device=device)
            losses.append(run(x))
        assert run.captures == 1, run.reason
        expected = torch.stack([eager.step(x) for x in xs])
        torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-3, atol=1e-4)
        assert held.isnan().all()


@pytest.mark.req("W-03")
def test_the_allocator_gives_the_memory_back() -> None:
    """Other processes get it: the reserved memory falls by the model's."""
    device = torch.device("cuda", torch.cuda.current_device())
    with world("one", device):
        trainee = Trainee(device)
        trainee.step(inputs(1)[0])
        states = [v for s in trainee.optimizer.state.values() for v in s.values()]
        nbytes = sum(t.nbytes for t in (*trainee.model.parameters(), *states))
        del states
        reserved = torch.cuda.memory_reserved(device)
        with released(trainee.model, trainee.optimizer):
            assert torch.cuda.memory_reserved(device) <= reserved - nbytes // 2


# ---- states of an optimizer on the host ----

SLEEP: Callable[[int], None] = vars(torch.cuda)["_sleep"]


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
