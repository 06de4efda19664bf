"""Ranks that never meet over a process group say so within seconds.

The time limits of collectives are those of a program that sets nothing: half an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import FSDPError, fully_shard, load, save
from composable_fsdp.errors import DesyncError
from composable_fsdp.features import map_on_owners
from tests.faults.blocks import SOON, Blocks, sharded, steps_of
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount
from tests.support.short_waits import LONG, shorten_waits
from tests.support.world import World


class Refused(Exception):
    """Raised by a module on a rank."""


def refuse(*_: object) -> None:
    raise Refused


def deviate(world: World, path: Path) -> tuple[str, float, bool, str]:
    """The last rank catches an error; each rank's error, its time, and what works then:
    a save without the group, and the next forward's error."""
    shorten_waits()
    model = sharded()
    steps_of(model, 4)
    last = world.rank == world.world_size - 1
    start = time.monotonic()
    if last:
        hook = model.blocks[1].register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(Refused):
            model(torch.ones(2, 4))
        hook.remove()
    with pytest.raises(DesyncError) as caught:
        model(torch.ones(2, 4))
    took = time.monotonic() - start
    # The weights are as they were, and can be saved although the group is torn.
    save(path / "saved", model)
    again = Blocks()
    load(path / "saved", again)
    expected = Blocks().state_dict()
    whole = all(torch.equal(v, expected[k]) for k, v in again.state_dict().items())
    with pytest.raises(FSDPError) as later:
        model(torch.ones(2, 4))
    return str(caught.value), took, whole, str(later.value)


@pytest.mark.req("X-06", "X-12")
def test_every_rank_has_the_proof_soon(ranks: RankCount, tmp_path: Path) -> None:
    """Each says what the rank that left does, and where another waits for it. A save is
    still possible, and the group refuses to be used."""
    found = ranks(3).run(deviate, tmp_path, timeout=60, retire=True)

    for rank, (text, took, whole, later) in enumerate(found):
        assert took < SOON, (rank, took)
        assert "after an exception that ended" in text
        assert rank < 2 or "let the ranks agree" in text
        assert "of 'blocks.1' (forward" in text
        assert whole
        assert "was left in the middle of a collective" in later
        assert "They will never meet." in text


def raise_and_go_on(world: World, strategy: str, at: str) -> tuple[str, float]:
    """The last rank catches an error; each rank's error, and its time."""
    shorten_waits()
    model = sharded(strategy)
    steps_of(model, 4)
    block, last = model.blocks[1], world.rank == world.world_size - 1
    register: dict[str, Callable[..., Any]] = {
        "forward": partial(block.register_forward_pre_hook, prepend=True),
        "backward": block.register_full_backward_pre_hook,
    }
    hook = register[at](refuse) if last else None
    start = time.monotonic()
    if hook is not None:
        with pytest.raises(Refused):
            model(torch.ones(2, 4)).sum().backward()
        hook.remove()
    with pytest.raises(DesyncError) as caught:
        steps_of(model)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.req("X-06")
def test_ranks_that_wait_over_the_groups_of_pieces_have_the_proof_soon(
    ranks: RankCount, at: str
) -> None:
    """They are in groups of which the rank that raised compares nothing."""
    found = ranks(4).run(raise_and_go_on, "HFSDP", at, timeout=60, retire=True)

    for rank, (text, took) in enumerate(found):
        assert took < SOON, (rank, took)
        assert "'blocks.1' " in text or "after an exception" in text


@pytest.mark.req("X-06")
def test_a_rank_in_a_reduce_scatter_has_the_proof_soon(ranks: RankCount) -> None:
    """The reduction that the last rank will not send ends on the others, too; backward
    gathers nothing with this strategy."""
    how = "SHARD_GRAD_OP", "backward"
    found = ranks(3).run(raise_and_go_on, *how, timeout=60, retire=True)

    for rank, (text, took) in enumerate(found):
        assert took < SOON, (rank, took)
        assert "he reduce-scatter of 'blocks.1' (backward" in text


def disagree_in_a_replica(world: World) -> float:
    """Rank 0 of four alone keeps the order of blocks; the time to each rank's error."""
    shorten_waits()
    model = sharded("HYBRID_SHARD")
    steps_of(model, 4)
    if world.rank:
        model.route = [2, 1, 0]
    start = time.monotonic()
    with pytest.raises(FSDPError):
        steps_of(model)
    return time.monotonic() - start


@pytest.mark.req("X-12", "D-07")
def test_the_other_replica_does_not_wait_for_ranks_that_have_raised(
    ranks: RankCount,
) -> None:
    """Its ranks have seen no difference, and wait in the reductions over replicas."""
    assert max(ranks(4).run(disagree_in_a_replica, timeout=60, retire=True)) < SOON


def catch_and_go_on(world: World) -> bool:
    """Both ranks catch the error of another mode; one comes late to the next step."""
    shorten_waits()
    model = sharded()
    steps_of(model, 5)
    model.train(world.rank > 0)
    with pytest.raises(DesyncError), torch.set_grad_enabled(world.rank == 0):
        model(torch.ones(2, 4))
    model.train()
    if world.rank:
        time.sleep(4 * LONG)
    steps_of(model, 3)
    return True


@pytest.mark.req("X-06")
def test_ranks_that_have_all_caught_an_error_go_on(ranks: RankCount) -> None:
    """No rank is in a collective then, so the group can be used."""
    assert all(ranks(2).run(catch_and_go_on, timeout=60, retire=True))


# ---- map_on_owners on ranks that do not do the same ----


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


def raise_on_an_owner(
    world: World, kind: type[BaseException]
) -> tuple[str, str, float]:
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
    found = ranks(3).run(raise_on_an_owner, kind, timeout=60, retire=True)

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
