"""The log of one direction, alone: what it expects, and how it words a difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.features.guard.order import MOST_EVENTS, Order
from composable_fsdp.features.guard.order_log import OrderLog
from composable_fsdp.features.guard.order_words import BEGIN, END


class Log(OrderLog):
    """Notes the comparisons that it is to make, and makes none."""

    def __init__(self, order: Order | None = None) -> None:
        super().__init__("forward", "Model", order or Order())
        self.made: list[str] = []

    def _exchange(self, at: str, values: Sequence[object]) -> None:
        self.made.append({BEGIN: "begin", END: "round"}.get(at, "use"))

    def _announce(self, at: str, *_: object, **__: object) -> None:
        self.made.append("depart begin" if at == BEGIN else "depart")


def made(log: Log) -> list[str]:
    found, log.made = log.made, []
    return found


@given(st.lists(st.sampled_from("fbc"), min_size=1, max_size=120))
def test_the_place_that_goes_on_is_the_earliest_that_is_most_like_the_end(
    events: list[str],
) -> None:
    """Up to 32 events before a place tell it apart; a surprise looks for another."""
    order = Order()
    at = 0
    for end, event in enumerate(events, 1):
        before, expected = events[:end], order.expected()
        order.note(event)
        if event == expected:
            at += 1
        else:
            alike = [
                next(
                    (n for n in range(min(i, 32)) if before[~n] != before[i - 1 - n]),
                    min(i, 32),
                )
                for i in range(end)
            ]
            at = alike.index(max(alike))
        assert order.at == at, before


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
    # The place of the first event of a period is not known before the period repeats.
    assert sum(missed[len(period) :]) <= 1
    assert not any(missed[2 * len(period) :])
