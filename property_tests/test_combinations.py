"""Combinations: what single tests show feature by feature holds when they meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from property_tests.combination_strategies import combinations
from property_tests.combinations import run_combination
from property_tests.live import examples
from tests.support.world import RankPool

RankCount = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@examples(10)
@given(data=st.data())
def test_whatever_is_combined_training_equals_the_plain_model(
    ranks: RankCount, world_size: int, data: st.DataObject
) -> None:
    """Losses, gradients and weights, with nothing left full, summoned or counted."""
    combination = data.draw(combinations(world_size))

    refused = ranks(world_size).run(run_combination, combination, timeout=20)

    event(refused[0].partition(":")[0] or "ran")
