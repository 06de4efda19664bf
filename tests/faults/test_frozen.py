"""Ranks that freeze other parameters than the others are told so by name.

gloo ends the process at the first reduce-scatter whose sizes differ, so the ranks have
to raise before.
"""

from __future__ import annotations

import time

import pytest
import torch

from composable_fsdp import FSDPError
from tests.faults.blocks import SOON, sharded, steps_of
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount
from tests.support.short_waits import shorten_waits
from tests.support.world import World


def freeze_other(
    world: World, strategy: str, steps: int, how: str
) -> tuple[str, float]:
    """After ``steps`` steps the last rank freezes (or the ranks freeze differently).

    Returns: the error of this rank, and its time.
    """
    shorten_waits()
    model = sharded(strategy)
    if how == "unfreezes":
        model.blocks[1].requires_grad_(requires_grad=False)
    steps_of(model, steps)
    if world.rank == world.world_size - 1:
        model.get_parameter("blocks.1.weight").requires_grad_(how == "unfreezes")
    elif how == "another":
        model.get_parameter("blocks.2.bias").requires_grad = False
    start = time.monotonic()
    with pytest.raises(FSDPError) as caught:
        steps_of(model)
    return str(caught.value), time.monotonic() - start


@pytest.mark.req("X-09")
@pytest.mark.parametrize(
    ("strategy", "steps", "how"),
    [("NO_SHARD", 1, "another"), ("FULL_SHARD", 4, "unfreezes")],
)
def test_ranks_that_freeze_other_parameters_raise_by_name(
    ranks: RankCount, strategy: str, steps: int, how: str
) -> None:
    """The frozen parameter and the way out are in every error."""
    found = ranks(2).run(freeze_other, strategy, steps, how, timeout=60, retire=True)

    for text, took in found:
        assert took < SOON
        assert "requires_grad=False of 'blocks.1.weight'" in text
        assert "Set requires_grad of the same parameters on every rank" in text
        if how == "another":
            assert "requires_grad=False of 'blocks.2.bias'" in text


@pytest.mark.req("D-07")
@on_ranks(4)
def test_a_replica_may_evaluate_alone_at_any_time(world: World) -> None:
    """The order of its shard group then differs from that of the other replica."""
    model = sharded("HYBRID_SHARD")
    for evaluations in (0, 0, 0, 0, 1, 2, 1, 0, 3):
        steps_of(model)
        if world.rank < 2:
            for _ in range(evaluations):
                with torch.no_grad():
                    model(torch.ones(1, 4))
    steps_of(model)


@on_ranks(2)
def test_ranks_that_freeze_alike_train_on(world: World) -> None:
    """A parameter that all ranks freeze and unfreeze in turn is no difference."""
    model = sharded("FULL_SHARD")
    for index in range(12):
        model.get_parameter("blocks.1.weight").requires_grad_(index % 2 == 0)
        model(torch.ones(2, 4)).sum().backward()
        assert (model.get_parameter("blocks.1.weight").grad is None) == (index % 2 == 1)
        model.zero_grad()
