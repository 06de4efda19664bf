"""What the libraries are measured on is the same work for all of them."""

from __future__ import annotations

from benchmarks.counting import counts
from benchmarks.variants import NAMES, choose

UNITS = 8


def test_the_floor_sends_what_we_send_with_less_around_it() -> None:
    """As many collectives but for the norm's, and fewer calls: it skips no unit's."""
    variants, _ = choose(["floor", "ours"])

    found = counts(variants, units=UNITS, parameters=6, world_size=8)

    floor, ours = found["floor"], found["ours"]
    assert floor.collectives_step == ours.collectives_step - 1 == 3 * UNITS + 2
    assert 0 < floor.calls_forward_backward < ours.calls_forward_backward


def test_every_name_of_a_variant_can_be_chosen() -> None:
    """Plain comes first and unasked, the others in the order of the tables."""
    variants, absence = choose(NAMES)

    assert absence is None
    assert [variant.name for variant in variants] == ["plain", *NAMES]
