"""Settings of property tests that run on live ranks.

A run on ranks costs tens of milliseconds, so several recipes travel in one example.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

T = TypeVar("T")

LONG = 2000
"""Examples of a law in the long profile."""
PER_RUN = 3
"""Recipes in one example."""


def examples(everyday: int) -> settings:
    """``everyday`` examples in the everyday profile, those of the long one in it.

    Any other number that was asked for scales ``everyday`` in proportion, to three or
    more: a single example is nearly always the simplest.
    """
    profile = settings.default
    assert profile is not None
    asked = profile.max_examples
    return settings(
        max_examples=asked if asked >= LONG else max(3, everyday * asked // 50),
        # Without the explain phase: each failing run restarts a pool of ranks.
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[
            HealthCheck.too_slow,
            # The pools live for the whole session, so sharing one is meant.
            HealthCheck.function_scoped_fixture,
        ],
    )


def batches(
    recipes: st.SearchStrategy[T], size: int = PER_RUN
) -> st.SearchStrategy[list[T]]:
    return st.lists(recipes, min_size=1, max_size=size)
