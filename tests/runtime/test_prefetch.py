"""Which units are gathered ahead of their use, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    BackwardPrefetch,
    fully_shard,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.phases import Residency
from composable_fsdp.tree import traversal
from tests.runtime.events import (
    EncoderDecoder,
    Event,
    block,
    gpt_steps,
    most_live,
    steps_of,
    units_of,
    unused,
)
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    gpt_input,
    gpt_units,
    train,
    trained_reference,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Steps = list[tuple[list[Event], list[Event]]]
PRE, POST = BackwardPrefetch
MODES = [PRE, POST, None]
BLOCKS = [f"blocks.{i}" for i in range(4)]


def chain(world: World, path: str, options: dict[str, Any]) -> Steps:
    """Events of three steps of a GPT of four blocks."""
    return gpt_steps(world.rank, path, **options)


def moment(events: list[Event], what: str, unit: str) -> int:
    """Where the event stands."""
    return events.index((what, unit))


@pytest.mark.req("S2-01", "S2-04")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
def test_backward_gathers_when_its_mode_says(
    ranks: RankCount, mode: BackwardPrefetch | None, path: str
) -> None:
    """PRE: before the unit after it is freed. POST: after that, and before it is asked
    for. None: when it is asked for."""
    for steps in ranks(2).run(chain, path, {"backward_prefetch": mode}):
        for _, events in steps:
            assert units_of(events, "gather") == BLOCKS[::-1]
            for this, later in pairwise(BLOCKS):
                gather = moment(events, "gather", this)
                before_free = gather < moment(events, "free", later)
                before_asked = gather < moment(events, "grad", this)
                assert (before_free, before_asked) == (mode is PRE, mode is not None)


@pytest.mark.req("S1-06", "S2-02")
@pytest.mark.parametrize("path", PATHS)
def test_forward_gathers_one_unit_ahead_from_the_second_step_on(
    ranks: RankCount, path: str
) -> None:
    """The next unit is gathered before this one is used; not in the first step, which
    has no record."""
    order = ["", *BLOCKS]
    for steps in ranks(2).run(chain, path, {"forward_prefetch": True}):
        for step, (events, _) in enumerate(steps):
            assert units_of(events, "gather") == order
            for this, after in pairwise(order):
                ahead = moment(events, "gather", after) < moment(events, "use", this)
                assert ahead == (step > 0)


@pytest.mark.req("S2-02")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "in_forward", "in_backward"),
    [
        ({"backward_prefetch": PRE}, 2, 3),
        ({"backward_prefetch": POST}, 2, 2),
        ({"backward_prefetch": None}, 2, 2),
        ({"backward_prefetch": PRE, "forward_prefetch": True}, 3, 3),
    ],
)
def test_few_units_have_memory_at_once(
    ranks: RankCount,
    options: dict[str, Any],
    in_forward: int,
    in_backward: int,
    path: str,
) -> None:
    """The root, the one that runs, and one more where the next is gathered ahead."""
    for steps in ranks(2).run(chain, path, options):
        forward, whole = steps[-1]
        assert most_live(forward) == in_forward
        # The root comes full out of forward.
        assert most_live([("gather", ""), *whole]) == in_backward


def branches(world: World, options: dict[str, Any]) -> tuple[Steps, bool]:
    """Events of an encoder and a decoder, units inside units; whether it trains
    right."""
    make = wide_input(6)
    sharded = apply_units(EncoderDecoder(), EncoderDecoder.UNITS, **options)
    plain, expected = trained_reference(EncoderDecoder, world.world_size, make, adamw)
    losses = train(sharded, world.rank, make, adamw)
    assert_same_training(
        sharded, plain, losses, [step[world.rank] for step in expected]
    )
    events = steps_of(sharded, [make(step, world.rank) for step in range(3)])
    return events, True


@pytest.mark.req("S2-01", "S2-02")
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_no_all_gather_is_wasted_where_units_hold_units(
    ranks: RankCount, mode: BackwardPrefetch | None, forward_prefetch: bool
) -> None:
    """Each unit is gathered once each way and used, also with a memory that several
    units read."""
    options = {"backward_prefetch": mode, "forward_prefetch": forward_prefetch}
    everyone = sorted(EncoderDecoder.UNITS)
    for steps, _ in ranks(2).run(branches, options):
        for forward, whole in steps:
            assert unused(forward) == unused(whole) == []
            assert sorted(units_of(forward, "gather")) == ["", *everyone]
            assert sorted(units_of(whole, "gather")) == everyone


def box(world: World, mode: BackwardPrefetch) -> Steps:
    """Events of a unit that returns what the last unit in it returns."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), inner)
    units = ["0", "1", "1.0", "1.1", "1.2"]
    sharded = apply_units(model, units, backward_prefetch=mode)
    return steps_of(sharded, [wide_input(4)(step, world.rank) for step in range(2)])


@pytest.mark.req("S2-01")
@pytest.mark.parametrize("mode", [PRE, POST])
def test_a_unit_that_shares_its_output_with_one_inside_misleads_nobody(
    ranks: RankCount, mode: BackwardPrefetch
) -> None:
    """Backward meets the inner one first; the next is gathered ahead all the same."""
    for steps in ranks(2).run(box, mode):
        for _, events in steps:
            assert units_of(events, "gather") == ["1.2", "1.1", "1.0", "0"]
            for unit in ("1.1", "1.0", "0"):
                assert moment(events, "gather", unit) < moment(events, "grad", unit)


def train_gpt(world: World, path: str, options: dict[str, Any]) -> None:
    """Three steps equal the reference."""
    model = TinyGPT(layers=3)
    sharded = apply_units(model, gpt_units(model), path=path, **options)
    plain, expected = trained_reference(
        TinyGPT, world.world_size, gpt_input, adamw, layers=3
    )
    losses = train(sharded, world.rank, gpt_input, adamw)
    assert_same_training(
        sharded, plain, losses, [step[world.rank] for step in expected]
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_prefetching_changes_no_number(
    ranks: RankCount,
    forward_prefetch: bool,
    mode: BackwardPrefetch | None,
    path: str,
) -> None:
    """Bit by bit the reference, whatever is gathered ahead."""
    options = {"backward_prefetch": mode, "forward_prefetch": forward_prefetch}

    ranks(2).run(train_gpt, path, options)


def list_ahead(model: nn.Module) -> None:
    """Blocks 0 and 3 gather two blocks ahead each, forward and backward."""
    set_modules_to_forward_prefetch(block(model, 0), [block(model, 1), block(model, 2)])
    set_modules_to_backward_prefetch(
        block(model, 3), [block(model, 2), block(model, 1)]
    )


def listed(world: World, path: str) -> tuple[Steps, Steps, Steps]:
    """Events with lists, without, and with lists that were taken back."""

    def take_back(model: nn.Module) -> None:
        list_ahead(model)
        set_modules_to_forward_prefetch(block(model, 0), [])
        set_modules_to_backward_prefetch(block(model, 3), [])

    options: dict[str, Any] = {"backward_prefetch": None}
    return (
        gpt_steps(world.rank, path, arrange=list_ahead, **options),
        gpt_steps(world.rank, path, **options),
        gpt_steps(world.rank, path, arrange=take_back, **options),
    )


@pytest.mark.req("B-15", "D-03")
@pytest.mark.parametrize("path", PATHS)
def test_listed_units_are_gathered_at_once_nearest_first(
    ranks: RankCount, path: str
) -> None:
    """All of the list, in its order, before the unit itself is used or freed; without
    the list they are not."""
    for steps, without, taken_back in ranks(2).run(listed, path):
        for forward, whole in steps:
            assert units_of(forward, "gather") == ["", *BLOCKS]
            assert units_of(whole, "gather") == BLOCKS[::-1]
            assert unused(forward) == unused(whole) == []
            for ahead in BLOCKS[1:3]:
                assert moment(forward, "gather", ahead) < moment(
                    forward, "use", BLOCKS[0]
                )
                assert moment(whole, "gather", ahead) < moment(whole, "free", BLOCKS[3])
        assert taken_back == without
        assert without != steps


@pytest.mark.req("B-15")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_lists_change_no_number(world: World, path: str) -> None:
    """Bit by bit the reference.

    Training with lists equals the reference.
    """
    model = TinyGPT(layers=4)
    sharded = apply_units(model, gpt_units(model), path=path)
    list_ahead(sharded)
    plain, expected = trained_reference(
        TinyGPT, world.world_size, gpt_input, adamw, layers=4
    )
    losses = train(sharded, world.rank, gpt_input, adamw)
    assert_same_training(
        sharded, plain, losses, [step[world.rank] for step in expected]
    )


class Fork(nn.Module):
    """Two branches, of which eval mode runs them the other way round, or just one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.three = nn.Linear(4, 4)
        self.short = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 4)`` to the same."""
        layers = [self.one, self.two, self.three]
        if not self.training:
            layers.reverse()
        for layer in layers[:1] if self.short else layers:
            x = layer(x)
        return x


def change_order(world: World) -> tuple[list[list[str]], list[bool], list[str], bool]:
    """Gathers of train, eval, train, eval, and whether the second was ahead of the
    first use; then of a forward that stops early."""
    model = Fork()
    sharded = apply_units(model, ["one", "two", "three"], forward_prefetch=True)
    gathers, ahead, wasted = [], [], []
    for training in (True, False, True, False):
        sharded.train(training)
        ((forward, _),) = steps_of(sharded, [torch.ones(2, 4)])
        gathers.append(units_of(forward, "gather"))
        first, second, _ = gathers[-1]
        ahead.append(moment(forward, "gather", second) < moment(forward, "use", first))
        wasted += unused(forward)
    model.short = True
    ((forward, _),) = steps_of(sharded, [torch.ones(2, 4)])
    resting = all(
        s.handle.residency is Residency.SHARDED
        for s in traversal._get_fsdp_states(sharded)
        if s.parent is not None
    )
    return gathers, ahead, [*wasted, "|", *unused(forward)], resting


@pytest.mark.req("S1-06")
def test_each_mode_has_its_order_and_what_is_not_used_is_freed(
    ranks: RankCount,
) -> None:
    """Eval is prefetched in eval's order; a forward that ends early frees what it
    gathered ahead."""
    there, back = ["one", "two", "three"], ["three", "two", "one"]
    for gathers, ahead, wasted, resting in ranks(2).run(change_order):
        assert gathers == [there, back, there, back]
        assert ahead == [False, False, True, True]
        assert wasted == ["|", "two"]
        assert resting


def count_walks(world: World) -> list[int]:
    """Walks of the module tree in each of three steps with prefetch both ways."""
    walks = 0
    real = traversal.walk_states

    def spy(module: nn.Module) -> Any:
        nonlocal walks
        walks += 1
        return real(module)

    model = TinyGPT()
    sharded = apply_units(model, gpt_units(model), forward_prefetch=True)
    loss_of_first = train(sharded, world.rank, gpt_input, adamw, steps=1)
    traversal.walk_states = spy
    try:
        train(sharded, world.rank, gpt_input, adamw, steps=2)
    finally:
        traversal.walk_states = real
    return [walks, len(loss_of_first)]


@pytest.mark.req("S1-06")
def test_prefetching_walks_no_tree(ranks: RankCount) -> None:
    """Targets come from records: no walk after the first step."""
    assert ranks(2).run(count_walks) == [[0, 1]] * 2


def test_lists_take_fully_sharded_modules_only(one_rank: World) -> None:
    """Another module is refused by the name of its class."""
    model = fully_shard(tiny_mlp())

    with pytest.raises(
        CompositionError, match="called on a Linear that is no fully sharded"
    ):
        set_modules_to_forward_prefetch(model, [model[0]])
    with pytest.raises(
        CompositionError, match="called on a Linear that is no fully sharded"
    ):
        set_modules_to_backward_prefetch(model[2], [model])


def list_foreign(world: World) -> str:
    """List a unit of another model, and run."""
    model, other = fully_shard(tiny_mlp()), fully_shard(tiny_mlp())
    set_modules_to_forward_prefetch(model, [other])
    with pytest.raises(CompositionError) as caught:
        model(torch.ones(2, 8))
    return str(caught.value)


def test_a_unit_of_another_tree_is_refused(ranks: RankCount) -> None:
    """The error comes at the forward, when it is known who is the root."""
    for text in ranks(2).run(list_foreign):
        assert "List units of one tree" in text
