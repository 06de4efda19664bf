"""Ranks that do different things are told so, before it does harm or hangs for ever."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reshard,
    unshard,
    unshard_params,
)
from composable_fsdp.comm import agreement, collectives
from composable_fsdp.features.guard import meetings, order_log, watch
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.world import RankFailure, RankPool, World

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = STRATEGIES
WIDTH = 4
FAIL: Callable[..., Any] = lambda *_: 1 // 0  # noqa: E731


class Blocks(nn.Module):
    """Equal blocks, run in the order that ``route`` gives; a bias may be left out."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.route = list(range(count))
        self.shifted = True

    def forward(self, x: Tensor) -> Tensor:
        for index in self.route:
            x = torch.tanh(self.blocks[index](x))
        x = x * self.scale
        return x + self.shift if self.shifted else x


def sharded_blocks(
    path: str = "composable", count: int = 3, **options: Any
) -> tuple[Blocks, nn.Module]:
    """The plain module, to steer by, and what to call."""
    model = Blocks(count)
    units = [f"blocks.{i}" for i in range(count)]
    return model, apply_units(model, units, path=path, **options)


def step(model: nn.Module, index: int, rank: int) -> None:
    backward(loss_of(model, wide_input(WIDTH)(index, rank)))


@pytest.fixture
def desync(ranks: Callable[[int], RankPool]) -> Callable[..., str]:
    """``desync(check, ...)`` runs ``check``, which must end in a DesyncError; its
    text."""

    def run(check: Callable[..., object], *args: object, world_size: int = 2) -> str:
        # Who has raised has said all; the peers are in a collective for nothing.
        with pytest.raises(RankFailure) as caught:
            ranks(world_size).run(check, *args, timeout=20, patience=0.1)
        return str(caught.value)

    return run


# ---- injected deviations --------------------------------------------------------


def deviate(world: World, path: str, how: str) -> None:
    """In the first step the last rank goes its own way."""
    model, sharded = sharded_blocks(path)
    if world.rank == world.world_size - 1:
        if how == "swap":
            model.route = [0, 2, 1]
        elif how == "stop":
            model.route = [0, 1]
        elif how == "eval":
            sharded.eval()
        elif how == "unused":
            model.shifted = False
    step(sharded, 0, world.rank)


LEAVES = [
    ("composable", "swap", "runs 'blocks.2'", "runs 'blocks.1'"),
    ("composable", "stop", "has no further unit to run", "runs 'blocks.2'"),
    ("wrapper", "eval", "(root) in eval mode", "(root) in training mode"),
    ("composable", "unused", "the backward of 'blocks.2'", "gradients of (root)"),
]


@pytest.mark.req("X-12", "D-06")
@pytest.mark.few(2)
@pytest.mark.parametrize(("path", "how", "mine", "others"), LEAVES)
def test_ranks_that_disagree_in_the_first_step_are_told_both_names(
    desync: Callable[..., str], how: str, mine: str, others: str, path: str
) -> None:
    """Whoever comes second to the same place raises, before it sends."""
    text = desync(deviate, path, how)

    told = text[text.index("DesyncError: Ranks disagree in ") :]
    assert re.match(r".* in \w+ 1, at [\w ]+: rank 0 .*; rank 1 ", told)
    assert mine in told
    assert others in told


# ---- what is legal stays legal --------------------------------------------------


@contextmanager
def counted_store() -> Iterator[Callable[[], int]]:
    """Count uses of the store; the function gives those since it was called last."""
    uses = 0
    real = agreement.key_value_store

    def spy() -> Any:
        nonlocal uses
        # The watch thread reads the store every few seconds.
        uses += threading.current_thread() is threading.main_thread()
        return real()

    def uncounted(owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            nonlocal uses
            before = uses
            try:
                return method(*args)
            finally:
                uses = before

        return mock.patch.object(owner, name, call)

    def since() -> int:
        nonlocal uses
        count, uses = uses, 0
        return count

    with (
        mock.patch.object(agreement, "key_value_store", spy),
        uncounted(meetings._Meeting, "look"),
        uncounted(watch.StoreWait, "pause"),
    ):
        yield since


COUNTED_TAGS = mock.patch.object(
    collectives, "all_gather_numbers", side_effect=collectives.all_gather_numbers
)


def run_schedule(
    world: World, model: Blocks, sharded: nn.Module, what: str, index: int
) -> None:
    """One round of a schedule."""
    if what == "evaluate":
        # After every second step, as training scripts do.
        step(sharded, index, world.rank)
        sharded.eval()
        with torch.no_grad():
            sharded(wide_input(WIDTH)(index, world.rank))
        sharded.train()
    elif what == "accumulate":
        with no_sync(sharded):
            step(sharded, index, world.rank)
    elif what == "calls":
        clip_grad_norm_(sharded, 1.0)
        with unshard_params(sharded, writeback=False):
            pass
        unshard(model.blocks[1])
        reshard(model.blocks[1])
    elif what == "freeze":
        # Two parts of a model in turn, as a GAN trains.
        model.blocks[0].requires_grad_(index % 2 == 0)
    elif what == "raise" and index == 0:
        # All ranks catch the error. The rounds that it ends have written keys.
        hook = model.blocks[1].register_full_backward_hook(FAIL)
        with pytest.raises(ZeroDivisionError):
            step(sharded, index, world.rank)
        hook.remove()
    step(sharded, index, world.rank)


@pytest.mark.few(3)
@pytest.mark.req("D-06")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("what", ["evaluate", "accumulate", "calls", "freeze", "raise"])
@on_ranks(2)
def test_a_schedule_is_compared_until_it_is_known_and_no_longer(
    world: World, what: str, path: str
) -> None:
    """Schedules that repeat cost nothing from their third round on."""
    model, sharded = sharded_blocks(path)
    made = []
    with counted_store() as stored, COUNTED_TAGS as tags:
        for index in range(9):
            run_schedule(world, model, sharded, what, index)
            made.append((tags.call_count, stored()))
            tags.reset_mock()
    assert made[0][0] > 0
    assert made[4:] == [(0, 0)] * 5


@pytest.mark.req("D-06")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_model_whose_order_changes_on_all_ranks_alike_trains(
    world: World, path: str
) -> None:
    """The numbers are the reference's. Each change meets in the store; equal steps
    exchange nothing."""
    model, sharded = sharded_blocks(path, count=4, forward_prefetch=True)
    plain = Blocks(4)
    optimizers = [sgd(each.parameters()) for each in (sharded, plain)]
    made = []
    routes = [[0, 1, 2], [2, 1], [3, 3, 0], [0, 1, 2, 3]] * 3
    routes += routes[-1:] * 6
    with counted_store() as stored, COUNTED_TAGS as tags:
        for index, route in enumerate(routes):
            for each in (model, plain):
                each.route, each.shifted = route, index in range(0, 12, 2)
            stored()
            step(sharded, index, world.rank)
            made.append((tags.call_count, stored()))
            tags.reset_mock()
            averaged_gradients(plain, [wide_input(WIDTH)(index, r) for r in range(2)])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_training(sharded, plain, [], [])
    assert all(uses > 0 for _, uses in made[1:12])
    assert made[13:] == [(0, 0)] * 5


def first_step(world: World, units: int) -> int:
    """How often a first step uses the store."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(units)))
    for each in (*model, model):
        fully_shard(each)
    optimizer = torch.optim.AdamW(model.parameters())
    with counted_store() as stored:
        backward(model(torch.ones(2, 8)).sum())
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        return stored()


@pytest.mark.req("X-12", "U-15")
def test_the_first_step_of_many_units_asks_the_store_eleven_times(
    ranks: Callable[[int], RankPool],
) -> None:
    """Forward, backward, clipping and the optimizer's first step, with what meetings
    before have left to clean up; looks at a rank that is late are not counted."""
    # Removes the keys that the models of other tests have left.
    ranks(2).run(first_step, 1)
    assert all(0 < asked <= 11 for asked in ranks(2).run(first_step, 30))


@on_ranks(2)
def test_a_captured_first_step_meets_in_the_store(world: World) -> None:
    """The host cannot read tags then."""
    _, sharded = sharded_blocks()
    captured = mock.patch.object(order_log, "is_capturing", return_value=True)
    with captured, counted_store() as stored, COUNTED_TAGS as tags:
        step(sharded, 0, world.rank)
        assert stored() > 0
        assert collectives.TAG not in [call.args[0] for call in tags.call_args_list]
