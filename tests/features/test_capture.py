"""Steps by ``capture``: one training step a call, with the numbers of eager steps.

On the CPU stand-ins take the place of the GPU and of the graph: a capture runs nothing,
and a replay runs the step on the inputs' memory. ``tests/gpu/test_compiled.py`` has the
graphs of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import CPUOffload, fully_shard
from composable_fsdp.features import captured_step
from composable_fsdp.features.captured_step import CapturedStep, capture
from tests.support.models import tiny_mlp
from tests.support.reference import backward
from tests.support.world import World


class Trainee:
    """A model with an optimizer and a step; ``calls`` counts runs of its Python."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = fully_shard(tiny_mlp(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.calls = 0

    def step(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        loss: Tensor = self.model(x).square().mean() * scale
        backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Recorder:
    """Stands for CUDA: ``captures`` counts captures, ``fails`` makes one raise."""

    captures = 0
    fails: str | None = None

    def record(self, step: Callable[[], Tensor], pool: object) -> Any:
        if self.fails:
            raise RuntimeError(self.fails)
        self.captures += 1
        output = torch.zeros(())
        return lambda: output.copy_(step()), output, pool


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(captured_step, "_on_gpu", lambda tensors: True)
    monkeypatch.setattr(captured_step, "_side_stream", nullcontext)
    monkeypatch.setattr(captured_step, "_record", made.record)
    return made


def inputs(count: int, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 8, generator=generator) for _ in range(count)]


def assert_as_eager(
    run: CapturedStep[..., Tensor], ours: Trainee, xs: list[Tensor]
) -> None:
    """Losses, kept as they came, and weights are those of eager steps."""
    eager = Trainee()
    losses = [run(x) for x in xs]
    assert losses == [eager.step(x) for x in xs]
    pairs = zip(ours.model.parameters(), eager.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.req("M-09")
def test_each_call_is_one_step_and_shapes_have_graphs_of_their_own(
    one_rank: World, recorder: Recorder
) -> None:
    """Three eager steps, then replays; one eager step for a new shape."""
    ours = Trainee()
    run = capture(ours.step, *inputs(1))

    # A replay moves no version and runs no hook, so that each counts as a step.
    with mock.patch.object(captured_step, "after_step") as counted:
        assert_as_eager(run, ours, [*inputs(5), *inputs(3, rows=2), *inputs(2)])
    assert counted.mock_calls == [mock.call(ours.optimizer)] * 6
    assert recorder.captures == run.captures == 2
    assert run.reason is None


@pytest.mark.req("M-09")
def test_a_float_learning_rate_that_changes_is_not_frozen(
    one_rank: World, recorder: Recorder
) -> None:
    """The step is captured again, ``max_graphs`` times at most, then eager."""
    ours, eager = Trainee(), Trainee()
    run = capture(ours.step, max_graphs=2)
    for at, x in enumerate(inputs(12)):
        for each in (ours, eager):
            each.optimizer.param_groups[0]["lr"] = 0.1 if at < 5 else 0.1 / at
        assert torch.equal(run(x), eager.step(x)), at

    assert recorder.captures == 2
    assert run.reason is not None
    assert "learning rate as a tensor" in run.reason


@pytest.mark.req("M-09")
def test_a_failed_capture_leaves_eager_steps_and_says_why(
    one_rank: World, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in the log."""
    recorder.fails = "operation not permitted when stream is capturing"
    ours = Trainee()
    run = capture(ours.step)

    assert_as_eager(run, ours, inputs(7))
    assert run.reason == f"the capture failed: {recorder.fails}"
    assert caplog.text.count(recorder.fails) == 1


@pytest.mark.req("M-09")
@pytest.mark.parametrize(
    ("options", "example", "reason"),
    [
        ({"cpu_offload": CPUOffload(True)}, inputs(1)[0], r"CPUOffload"),
        ({}, inputs(1)[0].requires_grad_(), "requires a gradient"),
    ],
)
def test_what_no_graph_can_do_is_eager(
    one_rank: World, recorder: Recorder, options: Any, example: Tensor, reason: str
) -> None:
    """Before a capture is tried."""
    run = capture(Trainee(**options).step)
    for _ in range(5):
        run(example)

    assert run.reason is not None
    assert reason in run.reason
    assert recorder.captures == 0


@pytest.mark.req("M-09")
def test_on_the_cpu_a_call_is_a_call(one_rank: World) -> None:
    """No stand-ins: nothing is captured, and other values are keys."""
    ours = Trainee()
    run = capture(ours.step, *inputs(1))

    assert_as_eager(run, ours, inputs(6))
    assert run.captures == 0
    assert ours.calls == 6
    with pytest.raises(TypeError, match=r"hashable values, got \['set'\]"):
        run(inputs(1)[0], {1.0})  # type: ignore[arg-type]
