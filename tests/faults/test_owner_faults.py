"""``map_on_owners`` on ranks that do not do the same."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import FSDPError, fully_shard
from composable_fsdp.errors import DesyncError
from composable_fsdp.features import map_on_owners
from tests.faults.blocks import SOON
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount
from tests.support.short_waits import shorten_waits
from tests.support.world import World


def trained() -> nn.Sequential:
    """Five matrices in each of two units, some of them cut, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5))) for _ in "ab")
    )
    for each in (*model, model):
        fully_shard(each)
    model(torch.ones(2, 8)).sum().backward()
    return model


def normalized(whole: Tensor, _: Tensor) -> Tensor:
    result: Tensor = whole / whole.norm()
    return result


@pytest.mark.req("X-12")
@on_ranks(2)
def test_other_matrices_on_a_rank_are_refused(world: World) -> None:
    """Before anything is sent: gloo would end a rank at sizes that differ."""
    model = trained()  # kept: its units end with it
    parameters = list(model.parameters())[:: 1 - 2 * world.rank]
    with pytest.raises(DesyncError, match="Ranks disagree: "):
        map_on_owners(parameters, [p.detach() for p in parameters], normalized)


def raise_and_go_on(world: World, kind: type[BaseException]) -> tuple[str, str, float]:
    """The function raises on the last rank, and every rank takes another step."""
    shorten_waits()
    model, start = trained(), time.monotonic()
    parameters = list(model.parameters())

    def refuse(whole: Tensor, _: Tensor) -> Tensor:
        if world.rank == world.world_size - 1:
            raise kind("no convergence")
        return whole

    with pytest.raises((kind, FSDPError)) as caught:
        map_on_owners(parameters, [p.detach() for p in parameters], refuse)
    with pytest.raises(FSDPError) as later:
        model(torch.ones(2, 8)).sum().backward()
    return str(caught.value), str(later.value), time.monotonic() - start


@pytest.mark.req("X-03")
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_owner_that_raised_does_not_go_on(
    ranks: RankCount, kind: type[BaseException]
) -> None:
    """Results that it owes never come, so later collectives could not pair."""
    found = ranks(3).run(raise_and_go_on, kind, timeout=60, retire=True)

    for text, later, took in found:
        assert took < SOON
        assert "no convergence" in text
        assert "was left in the middle of a collective" in later


@pytest.mark.req("X-03")
@on_ranks(2)
def test_a_value_that_a_rank_alone_leaves_out_is_no_zero(world: World) -> None:
    """The result is NaN on all ranks with a part, and not that of half a matrix."""
    parameters = list(trained().parameters())
    values: list[Tensor | None] = [p.detach() for p in parameters]
    left_out = [n for n, p in enumerate(parameters) if p.numel()]
    if world.rank == 1:
        for number in left_out:
            values[number] = None
    results = map_on_owners(parameters, values, normalized)
    for p, result in zip(parameters, results, strict=True):
        # Whole matrices lie on one rank; only a cut one has parts on both.
        if result is not None and 0 < p.numel() < 64:
            assert result.isnan().all()
