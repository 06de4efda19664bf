"""Settings of property tests that run on live ranks.

A run on ranks costs tens of milliseconds, so several recipes travel in one example.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from composable_fsdp.testing.recipes import ModelRecipe

PER_RUN = 3
"""Recipes in one example."""


def examples(everyday: int) -> settings:
    """``everyday`` examples in the everyday profile, in proportion in the others."""
    profile = settings.default
    assert profile is not None
    return settings(
        max_examples=max(1, everyday * profile.max_examples // 50),
        # Without the explain phase: each failing run restarts a pool of ranks.
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[
            HealthCheck.too_slow,
            # The pools live for the whole session, so sharing one is meant.
            HealthCheck.function_scoped_fixture,
        ],
    )


def batches(
    recipes: st.SearchStrategy[ModelRecipe], size: int = PER_RUN
) -> st.SearchStrategy[list[ModelRecipe]]:
    """Draw ``size`` recipes for one run; a failing run shrinks to one recipe."""
    return st.lists(recipes, min_size=1, max_size=size)
