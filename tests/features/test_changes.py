"""What one rank changed between steps, and refuses, is told to the ranks that wait."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from composable_fsdp import no_sync
from tests.faults.blocks import SOON, sharded, steps_of
from tests.support.sharded import RankCount, message_of
from tests.support.short_waits import shorten_waits
from tests.support.world import World


def change_alone(world: World, strategy: str, kind: str) -> tuple[str, float]:
    """Rank 1 alone changes a parameter; the error of this rank, and its time."""
    shorten_waits()
    model = sharded(strategy)
    steps_of(model, 4)
    if kind == "frozen":
        with no_sync(model):
            model(torch.ones(2, 4)).sum().backward()
    if world.rank == 1:
        if kind == "frozen":
            model.get_parameter("blocks.1.weight").requires_grad_(False)
        else:
            model.blocks[1].weight = nn.Parameter(torch.ones(3, 5))
    start = time.monotonic()
    text = message_of(lambda: steps_of(model, 2))
    return text, time.monotonic() - start


@pytest.mark.req("X-09")
@pytest.mark.parametrize(
    ("strategy", "size", "kind", "words"),
    [
        ("HYBRID_SHARD", 4, "shape", "'blocks.1.weight' was changed after fully_shard"),
        ("FULL_SHARD", 2, "frozen", "while its gradients wait to be reduced"),
    ],
)
def test_what_one_rank_refuses_is_heard_by_all(
    ranks: RankCount, strategy: str, size: int, kind: str, words: str
) -> None:
    """With its words, long before the time-out of the group."""
    run = ranks(size).run(change_alone, strategy, kind, timeout=60, retire=True)

    for rank, (text, took) in enumerate(run):
        assert took < SOON
        assert words in text, (rank, text)
        assert text.startswith("DesyncError") == (rank != 1), (rank, text)
