"""Order: what is gathered ahead, and what ranks say of it, whatever the model.

Legal programs never wait for a peer that need not come, and learn their schedule;
illegal ones end, in bounded time, with both names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import BackwardPrefetch, no_sync
from composable_fsdp.comm import agreement
from property_tests.live import batches, examples
from tests.runtime.events import units_of, unused, watched
from tests.support.models import build, legal_units
from tests.support.recipes import ModelRecipe
from tests.support.reference import apply_units, backward, loss_of, wide_input
from tests.support.sharded import RankCount
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import World

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
