"""``StepLog``: every token and second is counted once, and rank 0 alone writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.features import StepLog
from composable_fsdp.features.training import step_log
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World, single_rank_group

pytestmark = pytest.mark.req("N-14")


class Clock:
    """Stands in for ``time`` and moves when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def later(self, values: list[int], seconds: float) -> Iterator[int]:
        """Yield the values, each after ``seconds``."""
        for value in values:
            self.now += seconds
            yield value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_log, "time", made)
    return made


def test_a_line_has_speed_mfu_memory_and_waits(
    one_rank: World, clock: Clock, tmp_path: Path
) -> None:
    """Two steps of 100 tokens in 4 s, 1 s of which waits for data."""
    model = fully_shard(nn.Linear(9, 10))  # 100 parameters: 600 operations per token
    lines: list[str] = []
    seen: list[dict[str, float]] = []
    log = StepLog(
        model,
        every=2,
        write=lines.append,
        json_lines=tmp_path / "log.jsonl",
        to=[seen.append],
        peak_flops=60_000.0,
    )

    for _ in log.timed(clock.later([1, 2], 0.5)):
        clock.now += 1.5
        # Also of an evaluation that raises.
        with suppress(KeyError), log.paused():
            clock.now += 7.0
            raise KeyError
        log.step(2.5, tokens=100, lr=1e-3)

    (values,) = seen
    assert values["tokens_per_second"] == 50.0
    assert values["mfu"] == 0.5
    assert (values["data_seconds"], values["step_seconds"]) == (0.5, 2.0)
    assert 0 < values["peak_share"] < 1
    assert "step 2  loss 2.5000  50 tokens/s  MFU 50.0%  peak " in lines[0]
    assert lines[0].endswith("data 500.0 ms  lr 0.001")
    assert json.loads((tmp_path / "log.jsonl").read_text()) == values


@given(
    every=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), max_size=12),
)
def test_every_token_and_second_is_in_one_line(
    every: int, steps: list[tuple[int, int]]
) -> None:
    """Up to the last line, whatever the number of steps per line."""
    with single_rank_group(), pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(step_log, "time", clock)
        log = StepLog(fully_shard(nn.Linear(2, 2)), every=every, write=lambda text: 0)
        found: list[dict[str, float]] = []
        for tokens, seconds in steps:
            clock.now += seconds
            values = log.step(0.0, tokens)
            found += [] if values is None else [values]

    counted = steps[: len(steps) // every * every]
    spent = [each["step_seconds"] * every for each in found]
    speeds = [each["tokens_per_second"] for each in found]
    assert sum(spent) == pytest.approx(sum(seconds for _, seconds in counted))
    total = sum(a * b for a, b in zip(spent, speeds, strict=True))
    assert total == pytest.approx(sum(tokens for tokens, _ in counted))


@on_ranks(2)
def test_rank_0_alone_writes(world: World) -> None:
    """And the speed is that of all ranks."""
    lines: list[str] = []
    log = StepLog(fully_shard(tiny_mlp()), write=lines.append, to=[lambda v: None])

    values = log.step(1.0, tokens=10)

    assert values is not None
    assert len(lines) == (world.rank == 0)
    speed = values["tokens_per_second"] * values["step_seconds"]
    assert speed == pytest.approx(10 * world.world_size)


def test_tensorboard_and_a_run_of_wandb_get_the_values(one_rank: World) -> None:
    """Each in its own way."""
    written: list[Any] = []

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    class Run:
        def log(self, values: dict[str, float]) -> None:
            written.append(values)

    log = StepLog(fully_shard(tiny_mlp()), write=lambda text: 0, to=[Board(), Run()])

    values = log.step(torch.tensor(1.5, requires_grad=True), tokens=1)

    assert ("loss", 1.5, 1) in written
    assert written[-1] == values


def test_a_model_without_units_is_refused(one_rank: World) -> None:
    """By the name of the class."""
    text = message_of(lambda: StepLog(tiny_mlp()))

    assert text.startswith("CompositionError: StepLog was called on a Sequential")
