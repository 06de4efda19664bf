"""Claims on the slots of an arena under the streams of CUDA, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from composable_fsdp import Arena, BackwardPrefetch
from tests.runtime import test_streams
from tests.runtime.test_streams import CASES, gpt, train, watched
from tests.support.streams import StreamOrder


@pytest.mark.few(15)
@pytest.mark.req("M-07")
@pytest.mark.parametrize(
    "arena",
    [Arena(poison=True, reduce=True), Arena(shared=False, poison=True)],
    ids=["shared", "own"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_uses_of_a_slot_are_ordered(
    case: Callable[[StreamOrder], None], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gather, and what poisons the slot, come behind the last reader."""
    # All cases build their models by this function.
    apply = partial(test_streams.units, arena=arena)
    monkeypatch.setattr(test_streams, "units", apply)
    with watched() as order:
        case(order)


@pytest.mark.req("M-07")
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", [*BackwardPrefetch, None])
def test_every_prefetch_mode_is_ordered_in_slots(
    mode: BackwardPrefetch | None, ahead: bool
) -> None:
    """With and without limit."""
    for limited in (True, False):
        with watched() as order:
            model = gpt(
                order,
                backward_prefetch=mode,
                forward_prefetch=ahead,
                limit_all_gathers=limited,
                arena=Arena(poison=True, reduce=True),
            )
            train(model)
