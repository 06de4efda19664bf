"""The record of execution order: each use counts, and index 0 is an index."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.tree.state import StepOrder


def recorded(units: str) -> Any:
    """An order of strings, in the place of states."""
    order: Any = StepOrder()
    for unit in units:
        order.add(unit)
    return order


@pytest.mark.req("D-02", "S1-40")
@given(units=st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_walking_back_gives_the_uses_in_reverse(units: list[str]) -> None:
    """From each use, the unit before is the nearest earlier one that is another."""
    order = recorded("".join(units))

    for index, unit in enumerate(units):
        others = [u for u in units[:index] if u != unit]
        assert order.before(index) == (others[-1] if others else None)
