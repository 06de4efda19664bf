"""Ranks that do different things are told so, before it does harm or hangs for ever."""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.store_load import first_step
from composable_fsdp import ShardingStrategy, fully_shard, no_sync
from composable_fsdp.comm import agreement, collectives, meeting, watch
from tests.support.models import tiny_mlp
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
from tests.support.world import RankFailure, RankPool, World, fake_world

RankCount = Callable[[int], RankPool]
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = STRATEGIES
WIDTH = 4


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
        """Map ``(batch, WIDTH)`` to the same."""
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
    """One forward and backward."""
    backward(loss_of(model, wide_input(WIDTH)(index, rank)))


@pytest.fixture
def desync(ranks: RankCount) -> Callable[..., str]:
    """``desync(check, ...)`` runs ``check``, which must end in a DesyncError; its
    text."""

    def run(check: Callable[..., object], *args: object, world_size: int = 2) -> str:
        # Who has raised has said all; the peers are in a collective for nothing.
        with pytest.raises(RankFailure) as caught:
            ranks(world_size).run(check, *args, timeout=20, patience=0.1)
        return str(caught.value)

    return run


# ---- injected deviations --------------------------------------------------------


def deviate(world: World, path: str, how: str, at: int) -> None:
    """Four steps; in step ``at`` the last rank goes its own way."""
    model, sharded = sharded_blocks(path)
    for index in range(4):
        if index == at and world.rank == world.world_size - 1:
            # Nobody follows, so it need not wait long; until here it may have to.
            os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"
            if how == "swap":
                model.route = [0, 2, 1]
            elif how == "skip":
                model.route = [0, 2]
            elif how == "stop":
                model.route = [0, 1]
            elif how == "again":
                model.route = [0, 1, 2, 2]
            elif how == "eval":
                sharded.eval()
            elif how == "unused":
                model.shifted = False
        step(sharded, index, world.rank)


LEAVES = [
    ("swap", "runs 'blocks.2'", "runs 'blocks.1'"),
    ("skip", "runs 'blocks.2'", "runs 'blocks.1'"),
    ("stop", "has no further unit to run", "runs 'blocks.2'"),
    ("again", "runs 'blocks.2'", "has no further unit to run"),
    ("eval", "(root) in eval mode", "(root) in training mode"),
    (
        "unused",
        "has no gradient yet for 'shift'",
        "reduces the gradients of (root).",
    ),
]


# A run that fails costs a new pool, so the wrapper swaps and no more.
@pytest.mark.req("X-12", "D-06")
@pytest.mark.parametrize(
    ("path", "how", "mine", "others"),
    [*(("composable", *case) for case in LEAVES), ("wrapper", *LEAVES[0])],
)
def test_a_rank_that_leaves_the_recorded_order_is_told_what_and_where(
    desync: Callable[..., str], how: str, mine: str, others: str, path: str
) -> None:
    """The error of the rank itself: its use, the recorded one, who did not follow."""
    text = desync(deviate, path, how, 2)

    told = text[text.index("DesyncError: In ") :]
    assert "[rank 1]" in told
    assert mine in told
    assert others in told
    assert "recorded in" in told
    # The way out of a round in another mode is another than that of another unit.
    cure, name = (
        ("Call the model and backward on every rank", "even_batches(loader, model)")
        if how == "eval"
        else ("Every rank must run", "set_reduce_scatter_unused_params(module, True)")
    )
    # Between the two may stand what the store knows of rank 0.
    assert re.search(rf"Rank 0 did not come within 0\.2 s\. (Behind: .*)?{cure}", told)
    assert name in told


@pytest.mark.req("X-12", "D-06")
@pytest.mark.parametrize(
    ("path", "how", "one", "other"),
    [
        *(("composable", *case) for case in LEAVES if case[0] != "again"),
        ("wrapper", *LEAVES[0]),
    ],
)
def test_ranks_that_disagree_in_the_first_step_are_told_both_names(
    desync: Callable[..., str], how: str, one: str, other: str, path: str
) -> None:
    """Whoever comes second to the same place raises, before it sends."""
    text = desync(deviate, path, how, 0)

    told = text[text.index("DesyncError: Ranks disagree in ") :]
    assert "this rank " in told
    assert ", rank " in told
    assert one in told
    assert other.removesuffix(".") in told


def differ_in_width(world: World) -> None:
    """The same units by name, of other sizes."""
    model = fully_shard(tiny_mlp(hidden=12 + world.rank))
    model(torch.ones(2, 8))


def differ_in_groups(world: World) -> None:
    """The same units of the same sizes, their parameters grouped otherwise."""
    chosen = "0.weight", "2.weight" if world.rank else "0.bias"
    norms = nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.LayerNorm(8))
    model = fully_shard(norms, group_by=lambda name, parameter: name in chosen)
    model(torch.ones(2, 8))


@pytest.mark.req("X-09")
@pytest.mark.parametrize(
    ("differ", "told"),
    [
        (differ_in_width, "the shape of parameter '0.weight': (12, 8) on rank 0"),
        (differ_in_groups, "the flat buffer of parameter '0.bias' (group_by)"),
    ],
)
def test_models_laid_out_otherwise_are_told_apart_before_anything_is_sent(
    desync: Callable[..., str], differ: Callable[[World], None], told: str
) -> None:
    """Gathering them together would mix up values where sizes are equal, or end the
    process in gloo."""
    assert told in desync(differ)


def deviate_in_mesh(world: World) -> None:
    """Two replicas of two shards each; one rank leaves a parameter out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, sharded = sharded_blocks(
        device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD
    )
    for index in range(3):
        # Both shards of one replica: only the other replica can tell.
        model.shifted = index < 2 or world.rank < 2
        if not model.shifted:
            os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"
        step(sharded, index, world.rank)


@pytest.mark.req("D-06")
def test_replicas_that_disagree_are_told_so(desync: Callable[..., str]) -> None:
    """Reductions are compared over the replicate group too."""
    text = desync(deviate_in_mesh, world_size=4)

    assert "and has no gradient yet for 'shift'" in text
    assert "did not come within 0.2 s" in text


# ---- what is legal stays legal --------------------------------------------------


@contextmanager
def counted_store() -> Iterator[Callable[[], int]]:
    """Count uses of the store; the function gives those since it was called last.

    Looks and questions of a rank that waits for a late one are not counted.
    """
    uses = 0
    real = agreement._store

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
        mock.patch.object(agreement, "_store", spy),
        uncounted(meeting._Meeting, "look"),
        uncounted(agreement.Peers, "is_open"),
        uncounted(watch.StoreWait, "pause"),
    ):
        yield since


@contextmanager
def counted_tags() -> Iterator[Callable[[], int]]:
    """Count exchanges of tags, as ``counted_store`` does uses of the store."""
    uses = 0
    real = collectives.all_gather_tag

    def spy(*args: Any) -> Any:
        nonlocal uses
        uses += 1
        return real(*args)

    def since() -> int:
        nonlocal uses
        count, uses = uses, 0
        return count

    vars(collectives)["all_gather_tag"] = spy
    try:
        yield since
    finally:
        vars(collectives)["all_gather_tag"] = real


@contextmanager
def patience(seconds: str) -> Iterator[None]:
    """Have ranks wait so long for those that do not follow."""
    os.environ[agreement.TIMEOUT_VARIABLE] = seconds
    try:
        yield
    finally:
        del os.environ[agreement.TIMEOUT_VARIABLE]


def keys(world: World) -> int:
    """How many keys the store has, once all ranks are here."""
    world.barrier()
    store = agreement._store()
    count: int = store.num_keys()
    # A rank that waits long on a busy machine tells in which operation.
    for each in filter(lambda each: each.keys, watch._WATCH.groups()):
        told = [f"last/{n}" for n in range(world.world_size)]
        told += [f"op/{n}" for n in range(each.log.number + 2)]
        count -= sum(store.check([f"{each.keys}/{key}"]) for key in told)
    world.barrier()
    return count


Counts = list[tuple[int, int]]


def count_comparisons(world: World, path: str, what: str) -> tuple[Counts, int]:
    """Exchanged tags and uses of the store in nine rounds of a schedule; keys left."""
    # The keys of the last meeting of calls stay until the next.
    sharded_blocks(path)[1].state_dict()
    before = keys(world)
    model, sharded = sharded_blocks(path, forward_prefetch=what == "prefetch")
    made = []
    with counted_store() as stored, counted_tags() as tagged:
        for index in range(9):
            run_schedule(world, model, sharded, what, index)
            made.append((tagged(), stored()))
    return made, keys(world) - before


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    """Have the backward that reaches ``module`` raise."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = module.register_full_backward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def run_schedule(
    world: World, model: Blocks, sharded: nn.Module, what: str, index: int
) -> None:
    """One round of a schedule."""
    x = wide_input(WIDTH)(index, world.rank)
    if what == "evaluate":
        # After every second step, as training scripts do.
        step(sharded, index, world.rank)
        step(sharded, index, world.rank)
        sharded.eval()
        with torch.no_grad():
            sharded(x)
        sharded.train()
    elif what == "accumulate":
        with no_sync(sharded):
            step(sharded, index, world.rank)
            step(sharded, index, world.rank)
        step(sharded, index, world.rank)
    elif what == "two forwards":
        first, second = loss_of(sharded, x), loss_of(sharded, 2 * x)
        backward(first)
        backward(second)
    elif what == "inner":
        backward(loss_of(model.blocks[1], x))
        step(sharded, index, world.rank)
    elif what == "freeze":
        # Two parts of a model in turn, as a GAN trains.
        model.blocks[0].requires_grad_(index % 2 == 0)
        step(sharded, index, world.rank)
    elif what == "raise":
        # All ranks catch the error. The rounds that it ends have written keys.
        if index == 0:
            with pytest.raises(ZeroDivisionError), failing(model.blocks[1]):
                step(sharded, index, world.rank)
        step(sharded, index, world.rank)
    elif what == "recompute":
        backward(checkpoint(loss_of, sharded, x, use_reentrant=False))
    else:
        step(sharded, index, world.rank)


SCHEDULES = (
    "train",
    "prefetch",
    "evaluate",
    "accumulate",
    "two forwards",
    "inner",
    "recompute",
    "freeze",
    "raise",
)


@pytest.mark.few
@pytest.mark.req("D-06")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("what", SCHEDULES)
def test_a_schedule_is_compared_until_it_is_known_and_no_longer(
    ranks: RankCount, what: str, path: str
) -> None:
    """Schedules that repeat cost nothing from their third round on."""
    for made, left in ranks(2).run(count_comparisons, path, what):
        tags, uses_of_store = made[0]
        assert tags > 0
        # A model that begins where earlier models have an order departs from it.
        if what not in ("evaluate", "accumulate", "raise"):
            # A meeting, because an earlier model has used the group, takes 3, and a
            # departure from the order of that model 4.
            assert uses_of_store <= 8
        assert made[4:] == [(0, 0)] * 5
        assert left == 0


def drop_layers(world: World, path: str) -> tuple[Counts, int]:
    """Each step runs other blocks, and now and then without a parameter; the same on
    all ranks. Comparisons in each step; keys left behind."""
    model, sharded = sharded_blocks(path, count=4, forward_prefetch=True)
    # The keys of the last meeting of calls stay until the next.
    sharded.state_dict()
    before = keys(world)
    plain = Blocks(4)
    optimizer, reference = sgd(sharded.parameters()), sgd(plain.parameters())
    made = []
    routes = [[0, 1, 2], [2, 1], [3, 3, 0], [0, 1, 2, 3]] * 3
    with counted_store() as stored, counted_tags() as tagged:
        for index, route in enumerate(routes):
            for each in (model, plain):
                each.route, each.shifted = route, index % 2 == 0
            stored()
            step(sharded, index, world.rank)
            made.append((tagged(), stored()))
            inputs = [wide_input(WIDTH)(index, r) for r in range(world.world_size)]
            averaged_gradients(plain, inputs)
            for each_optimizer in (optimizer, reference):
                each_optimizer.step()
                each_optimizer.zero_grad()
    assert_same_training(sharded, plain, [], [])
    return made, keys(world) - before


@pytest.mark.req("D-06")
@pytest.mark.parametrize("path", PATHS)
def test_a_model_whose_order_changes_on_all_ranks_alike_trains(
    ranks: RankCount, path: str
) -> None:
    """The numbers are the reference's. After the order has changed twice, the ranks
    exchange a tag per forward and backward, and leave the store alone."""
    for made, left in ranks(2).run(drop_layers, path):
        assert [uses > 0 for _, uses in made[1:3]] == [True, True]
        assert made[4:] == [(2, 0)] * 8
        # The last tally over the group, which the next tally removes.
        assert left <= 1


def drop_another_layer(world: World) -> None:
    """Steps that run other blocks each time; in the last, a rank chooses alone."""
    model, sharded = sharded_blocks(count=4)
    for index, route in enumerate([[0, 1, 2], [2, 1], [3, 0], [0, 2, 3], [1, 2, 3]]):
        model.route = [1, 3, 2] if index == 4 and world.rank else route
        step(sharded, index, world.rank)


@pytest.mark.req("X-12")
def test_a_rank_that_chooses_other_layers_than_the_others_is_told(
    desync: Callable[..., str],
) -> None:
    """At the end of that forward, with both orders: before its gradients exist."""
    text = desync(drop_another_layer)

    one, other = (f"runs 'blocks.{i}' of 24 elements" for i in (2, 3))
    assert "Ranks disagree in forward 5, at use 2 (found at its end): " in text
    assert f"this rank {one}, rank 1 {other}. Every rank must run" in text
    assert f"this rank {other}, rank 0 {one}. Every rank must run" in text


def many_units(world: World) -> list[tuple[int, int]]:
    """Uses of the store, and tags, in the first steps of a model of 100 units."""
    _, sharded = sharded_blocks(count=100)
    made = []
    with counted_store() as stored, counted_tags() as tagged:
        for index in range(3):
            step(sharded, index, world.rank)
            made.append((stored(), tagged()))
    return made


@pytest.mark.req("X-12", "U-15")
def test_the_first_step_of_many_units_leaves_the_store_alone(ranks: RankCount) -> None:
    """A tag per use, by collectives: a store that serves many ranks has no queue."""
    for made in ranks(2).run(many_units):
        (first, tags), (second, _), third = made
        assert first <= 10
        assert second <= 10
        assert 300 <= tags <= 310
        assert third == (0, 0)


class Wrapped(nn.Module):
    """Another class of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
        out: Tensor = self.blocks[0](x)
        return out


@pytest.mark.req("X-12", "U-15")
def test_the_first_step_of_many_units_asks_the_store_ten_times(
    ranks: RankCount,
) -> None:
    """Forward, backward, clipping and the optimizer's first step, with what meetings
    before have left to clean up; looks at a rank that is late are not counted."""
    # Removes the keys that the models of other tests have left.
    ranks(2).run(first_step, 1)
    for parts in ranks(2).run(first_step, 100):
        requests = [name for part in parts for name in part]
        asked = [name for name in requests if name not in ("get", "check")]
        assert 0 < len(asked) <= 10, " ".join(requests)


def swap_models(world: World, at: int) -> None:
    """Four evaluations by two models of one shape; a rank swaps them in one."""
    # The comparison of weights would tell the models apart in the first step.
    models = [
        apply_units(Wrapped(), ["blocks.0"], path="composable", check_weights="off")
        for _ in range(2)
    ]
    x = wide_input(WIDTH)(0, world.rank)
    with torch.no_grad():
        for index in range(4):
            swaps = index == at and world.rank == 1
            if swaps and at:
                os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"
            for model in reversed(models) if swaps else models:
                model(x)


@pytest.mark.req("X-12")
@pytest.mark.parametrize("at", [0, 3])
def test_two_models_in_another_order_on_one_rank_are_told(
    desync: Callable[..., str], at: int
) -> None:
    """In the first step and in a later step; torch's FSDP swaps the outputs."""
    text = desync(functools.partial(swap_models, at=at))

    assert "a forward of Wrapped (order log " in text
    assert "DesyncError: " in text


class Refused(Exception):
    """Raised by a module that refuses a sample."""


def evaluate_and_skip(
    world: World, path: str, place: str, *, first: int, everyone: bool
) -> list[bool]:
    """Five samples in evaluation, one of which ranks refuse at ``place`` and skip.

    Returns whether each output of this rank is that of the plain model.
    """
    model, sharded = sharded_blocks(path)
    plain = Blocks()
    right = []

    def refuse(*_: object) -> None:
        raise Refused

    for index in range(5):
        x = wide_input(WIDTH)(index, world.rank)
        refuses = index == first and (everyone or world.rank == 1)
        if refuses and not everyone:
            # Nobody follows, so it need not wait long; until here it may have to.
            os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"
        if refuses:
            module = model if place == "end" else model.blocks[1]
            hook: Any = (
                module.register_forward_hook(refuse)
                if place == "end"
                else module.register_forward_pre_hook(refuse, prepend=True)
            )
        with torch.no_grad():
            try:
                right.append(torch.allclose(sharded(x), plain(x)))
            except Refused:
                assert refuses
                hook.remove()
    return right


@pytest.mark.req("X-06")
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("path", PATHS)
def test_a_sample_that_one_rank_skips_in_the_middle_is_told(
    desync: Callable[..., str], path: str, first: int
) -> None:
    """The other rank waits in a collective, with which no other collective pairs."""
    text = desync(
        functools.partial(evaluate_and_skip, first=first, everyone=False), path, "unit"
    )

    assert f"begins forward {first + 2} after an exception that ended" in text
    assert f"forward {first + 1} at use 2" in text
    assert "Rank 0 did not come within 0.2 s." in text
    assert "let the ranks agree" in text


@pytest.mark.req("X-06")
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("path", PATHS)
def test_a_sample_that_all_ranks_skip_is_skipped(
    ranks: RankCount, path: str, first: int
) -> None:
    """Every other output is right."""
    check = functools.partial(evaluate_and_skip, first=first, everyone=True)

    assert ranks(2).run(check, path, "unit") == [[True] * 4] * 2


@pytest.mark.req("X-06")
@pytest.mark.parametrize("path", PATHS)
def test_an_output_that_one_rank_refuses_is_skipped_by_that_rank(
    ranks: RankCount, path: str
) -> None:
    """All collectives of the forward have run, so the next forward pairs."""
    check = functools.partial(evaluate_and_skip, first=3, everyone=False)

    assert ranks(2).run(check, path, "end") == [[True] * 5, [True] * 4]


def late_peer(world: World) -> bool:
    """One rank comes to a change of order later than the others, and is waited for."""
    model, sharded = sharded_blocks()
    for index in range(4):
        if index == 3:
            model.route = [2, 1, 0]
            if world.rank == 1:
                time.sleep(0.5)
        step(sharded, index, world.rank)
    return True


@pytest.mark.req("D-06")
def test_a_rank_that_is_late_is_waited_for(ranks: RankCount) -> None:
    """A change of order takes as long as the slowest rank, within the timeout."""
    assert all(ranks(2).run(late_peer))


def evaluate_alone(world: World) -> bool:
    """With replicated parameters one rank may evaluate, and accumulate, alone."""
    with patience("1"):
        _, sharded = sharded_blocks(strategy=NO_SHARD)
        for index in range(4):
            if world.rank == 0:
                sharded.eval()
                with torch.no_grad():
                    sharded(wide_input(WIDTH)(index, 0))
                sharded.train()
                with no_sync(sharded):
                    step(sharded, index, 0)
            step(sharded, index, world.rank)
    return True


@pytest.mark.req("D-06")
def test_what_sends_nothing_is_not_compared(ranks: RankCount) -> None:
    """Nobody waits for ranks that need not come."""
    assert all(ranks(2).run(evaluate_alone))


def two_roots(world: World) -> bool:
    """Two models, by turns and one inside the step of the other."""
    _, one = sharded_blocks()
    _, two = sharded_blocks(count=2)
    for index in range(4):
        x = wide_input(WIDTH)(index, world.rank)
        backward(loss_of(two, one(x)))
        if index % 2:
            step(two, index, world.rank)
    return True


@pytest.mark.req("D-06")
def test_several_models_have_orders_of_their_own(ranks: RankCount) -> None:
    """Also if one feeds the other."""
    assert all(ranks(2).run(two_roots))


def go_on_after_an_error(world: World) -> list[int]:
    """Forward and backward raise on all ranks by turns, with two steps in between; uses
    of the store by the second."""
    used = []

    def trip(*_: object) -> None:
        raise RuntimeError("tripped")

    with patience("2"), counted_store() as since:
        model, sharded = sharded_blocks()
        for index in range(6):
            block = model.blocks[1]
            hook = (
                block.register_forward_pre_hook(trip)
                if index % 2
                else block.register_full_backward_hook(trip)
            )
            with pytest.raises(RuntimeError, match="tripped"):
                step(sharded, index, world.rank)
            hook.remove()
            since()
            if index > 1:
                step(sharded, index, world.rank)
                since()
                step(sharded, index, world.rank)
                used.append(since())
    return used


def test_a_step_that_raises_on_all_ranks_does_not_disturb_the_record(
    ranks: RankCount,
) -> None:
    """Neither while it is written nor later: once the ranks have met after the error,
    they find it as it was."""
    for used in ranks(2).run(go_on_after_an_error):
        assert used[1:] == [0, 0, 0]


def disagree_unnoticed(world: World) -> int:
    """Swap equal blocks with the comparison off; uses of the store."""
    with patience("0"), counted_store() as since:
        model, sharded = sharded_blocks()
        if world.rank:
            model.route = [0, 2, 1]
        step(sharded, 0, world.rank)
        return since()


def test_the_comparison_can_be_switched_off(ranks: RankCount) -> None:
    """With the variable at 0 nothing goes to the store, and nobody notices."""
    assert ranks(2).run(disagree_unnoticed, retire=True) == [0, 0]


def test_a_fake_group_compares_with_nobody() -> None:
    """There is no peer, and still an order to prefetch by."""
    with fake_world(4):
        model = fully_shard(nn.Linear(4, 4))
        for _ in range(3):
            step(model, 0, 0)
        state = fully_shard.state(model)
        assert state is not None
        log = state.handle.logs.forward
        assert log is not None
        assert log.comparison.peers == ()
        assert log.round == 3
