"""Order: what is gathered ahead, and what ranks say of it, whatever the model.

Legal programs never wait for a peer that need not come, and learn their schedule;
illegal ones end, in bounded time, with both names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import BackwardPrefetch, CustomPolicy, no_sync, plan
from composable_fsdp.comm import agreement
from property_tests.live import batches, examples
from tests.runtime.events import units_of, unused, watched
from tests.support.models import build, legal_units, module_at
from tests.support.recipes import ModelRecipe
from tests.support.reference import apply_units, backward, loss_of, wide_input
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankFailure, RankPool, World

RankCount = Callable[[int], RankPool]
MODES = [*BackwardPrefetch, None]
ROUNDS = ("train", "evaluate", "accumulate", "twice")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Let a rank wait so long for others to change their order."""
    os.environ[agreement.TIMEOUT_VARIABLE] = str(seconds)
    try:
        yield
    finally:
        del os.environ[agreement.TIMEOUT_VARIABLE]


def run_round(model: nn.Module, what: str, x: torch.Tensor) -> None:
    """One forward or more, with what belongs to it."""
    if what == "evaluate":
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        return
    losses = [loss_of(model, x) for _ in range(2 if what == "twice" else 1)]
    for loss in losses:
        if loss.requires_grad and what == "accumulate":
            with no_sync(model):
                backward(loss)
        elif loss.requires_grad:
            backward(loss)


def check_legal(
    world: World,
    recipes: list[ModelRecipe],
    rounds: list[str],
    mode: BackwardPrefetch | None,
) -> None:
    """Any rounds in any order: no error, no gather wasted from the known modes on."""
    for recipe in recipes:
        model = build(recipe)
        units = legal_units(model, recipe.sharded)
        sharded = apply_units(
            model, units, forward_prefetch=True, backward_prefetch=mode
        )
        make = wide_input(recipe.width)
        with patience(5), watched() as events:
            for index, what in enumerate([*rounds, *rounds]):
                run_round(sharded, what, make(index, world.rank))
        assert unused(events) == [], recipe
        for _, unit in events:
            gathers = units_of(events, "gather").count(unit)
            assert gathers == units_of(events, "free").count(unit), unit
        assert world.all_equal(events), recipe


@pytest.mark.req("D-06", "S2-01")
@pytest.mark.parametrize("mode", MODES)
@examples(8)
@given(
    recipes=batches(model_recipes(2, 3, FEATURES - {"replicate"})),
    rounds=st.lists(st.sampled_from(ROUNDS), min_size=1, max_size=5),
)
def test_legal_programs_run_and_waste_no_gather(
    ranks: RankCount,
    mode: BackwardPrefetch | None,
    recipes: list[ModelRecipe],
    rounds: list[str],
) -> None:
    """Training, evaluation, accumulation and several forwards, in any order."""
    ranks(2).run(check_legal, recipes, rounds, mode)


def order_of(
    recipe: ModelRecipe, units: list[str], parent: str | None = None
) -> list[str]:
    """Units in the order of their forwards; ``parent``'s children run in reverse."""
    model = build(recipe)
    if parent is not None:
        turn_round(model, parent)
    seen: list[str] = []
    for unit in units:
        module_at(model, unit).register_forward_pre_hook(
            lambda *_, unit=unit: seen.append(unit)
        )
    model(torch.ones(2, recipe.width))
    return seen


def turn_round(model: nn.Module, parent: str) -> None:
    """Reverse the order in which ``parent`` runs its children."""
    children = module_at(model, parent)._modules
    for name in list(children)[-2::-1]:
        children[name] = children.pop(name)


def sending_units(recipe: ModelRecipe) -> list[str]:
    """Units that own elements, so that they gather."""
    model = build(recipe)
    units = legal_units(model, recipe.sharded)
    found = plan(
        model,
        world_size=2,
        policy=CustomPolicy(
            lambda module: any(module is module_at(model, unit) for unit in units)
        ),
    )
    sized = {u.fqn for u in found.units if any(r.numel for r in u.regions)}
    return [unit for unit in units if unit in sized]


def check_illegal(world: World, recipe: ModelRecipe, parent: str, at: int) -> None:
    """The last rank runs the children of ``parent`` in reverse from step ``at`` on."""
    model = build(recipe)
    units = legal_units(model, recipe.sharded)
    sharded = apply_units(model, units, forward_prefetch=True)
    make = wide_input(recipe.width)
    for index in range(4):
        if index == at and world.rank == world.world_size - 1:
            turn_round(model, parent)
            # Nobody follows, so it need not wait long; until here it may have to.
            os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"
        loss = loss_of(sharded, make(index, world.rank))
        if loss.requires_grad:
            backward(loss)


def turned_somewhere(recipe: ModelRecipe) -> list[tuple[str, str, str]]:
    """Modules whose children in reverse change the order of units that gather, and the
    first two units that then meet."""
    units = sending_units(recipe)
    straight = order_of(recipe, units)
    found = []
    for parent in recipe.paths():
        turned = order_of(recipe, units, parent)
        pairs = [(a, b) for a, b in zip(straight, turned, strict=True) if a != b]
        found += [(parent, *pair) for pair in pairs[:1]]
    return found


@pytest.mark.req("D-06", "X-12")
@examples(4)
@given(
    recipe=model_recipes(2, 3, FEATURES - {"replicate", "shared", "tied", "dtypes"}),
    at=st.sampled_from([0, 3]),
    data=st.data(),
)
def test_another_order_on_one_rank_is_named(
    ranks: RankCount, recipe: ModelRecipe, at: int, data: st.DataObject
) -> None:
    """Wherever in the tree, in the first step or later."""
    turns = turned_somewhere(recipe)
    assume(turns)
    parent, usual, other = data.draw(st.sampled_from(turns))

    with pytest.raises(RankFailure) as caught:
        ranks(2).run(check_illegal, recipe, parent, at, patience=0.1)

    text = str(caught.value)
    assert "DesyncError" in text
    # Before the first gather the models themselves are compared, by registration.
    if at == 0:
        assert "sharded different models. They differ first in unit number" in text
    else:
        assert f"runs {usual!r}" in text
        assert f"runs {other!r}" in text
