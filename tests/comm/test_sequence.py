"""The history of rounds and calls over some groups, and what it expects."""

from __future__ import annotations

import pytest

from composable_fsdp.features.guard.meetings import MOST_EVENTS, Order


@pytest.mark.req("X-12", "D-06")
@pytest.mark.parametrize("period", ["fb" * 16 + "c", "fnfnfnfs", "fb" * 1000 + "e"])
def test_a_history_that_repeats_is_expected_from_its_second_period_on(
    period: str,
) -> None:
    """Calls after many rounds, accumulation, rare evaluations; and it stays bounded."""
    order = Order()
    missed = []
    for event in period * 6:
        missed.append(order.expected() != event)
        order.note(event)

    assert len(order.events) <= MOST_EVENTS
    # The end of a period is known once it has come twice.
    assert sum(missed[len(period) :]) <= 4
    assert not any(missed[2 * len(period) :])
