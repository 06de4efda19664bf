"""Why rounds and calls have a predictor each: what they expect of a training loop."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from composable_fsdp.comm.call_order import CallOrder
from composable_fsdp.comm.sequence import RoundOrder

FORWARD, BACKWARD, CLIP = range(3)
STEPS = 40


def wrong_by_rounds(events: Sequence[int]) -> int:
    """Number of events of the last of many equal steps that ``RoundOrder`` misses."""
    order, wrong = RoundOrder(), 0
    for _ in range(STEPS):
        wrong = 0
        for event in events:
            wrong += order.expected() != event
            order.begin(event, "mode")
    return wrong


def wrong_by_calls(events: Sequence[Hashable]) -> int:
    """The same of ``CallOrder``."""
    order, wrong = CallOrder(), 0
    for _ in range(STEPS):
        wrong = 0
        for event in events:
            wrong += order.following.get(order.place) != event
            order.note(event)
    return wrong


@pytest.mark.parametrize("forwards", [1, 4, 16, 32])
def test_a_call_after_many_forwards_is_expected(forwards: int) -> None:
    """The number of forwards in a row is known, as far as the table has room."""
    assert wrong_by_calls([*[FORWARD] * forwards, CLIP]) == 0


@pytest.mark.parametrize("forwards", [1, 4, 16, 64])
def test_rounds_of_accumulated_batches_are_expected(forwards: int) -> None:
    """Forward and backward take turns."""
    assert wrong_by_rounds([FORWARD, BACKWARD] * forwards) == 0


def test_rounds_of_models_that_take_turns_are_expected() -> None:
    """A step in which equal rounds are followed by different ones."""
    assert wrong_by_rounds([0, 1, 2, 3, 0, 2, 3, 1]) == 0


def test_neither_predictor_serves_for_the_other() -> None:
    """If one of these numbers is 0, that predictor can take the other's place."""
    assert wrong_by_rounds([*[FORWARD, BACKWARD] * 16, CLIP]) > 0
    assert wrong_by_calls([*[FORWARD, BACKWARD] * 16, CLIP]) > 0
    assert wrong_by_calls([0, 1, 2, 3, 0, 2, 3, 1]) > 0
