"""The collectives of a rank can be read afterwards, and are in the errors."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable_fsdp
from composable_fsdp import FSDPError, fully_shard
from composable_fsdp.comm import collectives, operations
from composable_fsdp.comm.groups import MOST_OPERATIONS, operation_log
from composable_fsdp.errors import CollectiveError
from composable_fsdp.features import recent_operations
from tests.support.sharded import RankCount
from tests.support.world import World, fake_world


@pytest.mark.req("U-10")
def test_a_step_can_be_read_afterwards() -> None:
    """Numbers without gaps; unit, phase, size, dtype and times of each collective."""
    with fake_world(4):
        model = fully_shard(
            nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Linear(8, 3))
        )
        model(torch.ones(2, 8)).sum().backward()
        composable_fsdp.clip_grad_norm_(model, 1.0)
        found = recent_operations(dist.group.WORLD)

    assert [record.number for record in found] == list(range(1, len(found) + 1))
    told = [(r.op, r.unit, r.phase, r.numel, r.dtype) for r in found]
    assert told[:5] == [
        ("all_gather", "(root)", "forward", 32, "float32"),
        ("all_gather", "'0'", "forward", 96, "float32"),
        ("all_gather", "'0'", "backward", 96, "float32"),
        ("reduce_scatter", "(root)", "backward", 32, "float32"),
        ("reduce_scatter", "'0'", "backward", 96, "float32"),
    ]
    assert told[-1][:3] == ("all_reduce", "", "clip_grad_norm_")
    for record in found:
        assert record.waited is not None
        assert record.done is not None
        assert record.issued <= record.waited <= record.done <= time.time()
    line = (
        r"2 all_gather '0' \(forward, 96 x float32\): issued [\d:.]+, done, waited .*"
    )
    assert re.fullmatch(line, str(found[1]))


def test_the_log_keeps_no_memory_and_no_model_alive() -> None:
    """A thousand records are a few hundred bytes each, and hold no tensor."""
    with fake_world(2):
        group = dist.group.WORLD
        assert group is not None
        for _ in range(MOST_OPERATIONS + 5):
            collectives.all_reduce(torch.ones(2), group)
        log = operation_log(group)

        assert len(log.operations) == MOST_OPERATIONS
        assert log.number == MOST_OPERATIONS + 5
        assert all(each.work is None for each in log.operations)


def lose_a_peer(world: World) -> str:
    """Rank 1 closes its connections in the middle of a step."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert group is not None
    model = fully_shard(nn.Linear(8, 8), process_group=group)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    if world.rank:
        time.sleep(2.5)
        return ""
    with pytest.raises(CollectiveError) as caught:
        model(torch.ones(2, 8))
    error = caught.value
    assert isinstance(error, FSDPError)
    assert (error.unit, error.op, error.phase) == ("(root)", "all_gather", "forward")
    assert error.rank == 0
    assert error.elapsed is not None
    assert 1.5 < error.elapsed < 60
    assert isinstance(error.__cause__, RuntimeError)
    return str(error)


@pytest.mark.req("U-10")
def test_a_failed_collective_names_rank_unit_op_phase_and_time(
    ranks: RankCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The raw error is the cause; the last operations of the rank are in the text."""
    text, _ = ranks(2).run(lose_a_peer, retire=True)

    assert re.match(
        r"The all-gather of \(root\) \(forward; operation \d+ of process group '\w+'\) "
        r"failed on this rank after [\d.]+ s: .*[Tt]imed out",
        text,
    )
    assert "The last operations of this rank: " in text
    assert "all_gather (root) (forward, 96 x float32)" not in text
    assert "reduce_scatter (root) (backward, 80 x float32)" in text, text
    assert text.endswith("[rank 0]")


class EndsAtTheLimit:
    """A collective that completes when the limit of a wait has just ended the wait."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def wait(self, limit: timedelta) -> None:
        """Time out once; then say how the collective has ended."""
        self.waits += 1
        if self.waits == 1:
            time.sleep(limit.total_seconds())
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_with_the_limit_of_a_wait_has_not_failed() -> None:
    """Only an error of the collective itself counts."""
    with fake_world(2):
        assert dist.group.WORLD is not None
        collectives.all_reduce(torch.ones(2), dist.group.WORLD)
        log = operation_log(dist.group.WORLD)
        log.patience = timedelta(seconds=0.05)
        sent = []
        for work in (EndsAtTheLimit(), EndsAtTheLimit("Connection closed")):
            operation = operations.Operation(
                log, "all_reduce", None, "a test", [torch.ones(2)]
            )
            operation.work = work
            sent.append(operation)

        sent[0].wait()
        with pytest.raises(CollectiveError, match="Connection closed"):
            sent[1].wait()

    assert sent[0].done
