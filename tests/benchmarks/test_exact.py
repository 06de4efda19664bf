"""What the exact benchmarks show is true of small models, too."""

from __future__ import annotations

import pytest

from benchmarks import memory, scale, traffic
from benchmarks.models import Gpt
from benchmarks.traffic import UNITS, VARIANTS, padding

SMALL = {"width": 64, "hidden": 96, "heads": 4, "kv_heads": 2, "vocab": 128}


@pytest.mark.few(1)
@pytest.mark.req("U-03")
@pytest.mark.parametrize("order", memory.ORDERS)
@pytest.mark.parametrize("tokens", [memory.LONG, memory.SHORT])
def test_the_peak_is_below_that_of_the_peers(tokens: int, order: str) -> None:
    """With one unit gathered ahead at most FSDP2's; with none also below FSDP1's, and
    below that of the least that sharded training must do."""
    fsdp1, fsdp2, floor = (
        memory.measure_peer(shard, 8, tokens, order=order, layers=3).step
        for shard in memory.PEERS.values()
    )

    ahead, _, alone = (
        memory.measure_ours(8, tokens, prefetch=mode, order=order, layers=3)
        for _, mode in memory.OURS
    )

    assert ahead.step <= 1.001 * fsdp2
    assert alone.step < min(fsdp1, fsdp2, floor)
    if tokens == memory.SHORT:
        assert ahead.planned <= ahead.step <= 1.01 * ahead.planned


def test_sharding_from_meta_needs_one_unit_above_the_shards() -> None:
    """Each unit gets its values when it is sharded, and keeps its shard of them."""
    peak, shards, unit = memory.measure_sharding(8)

    assert 0 < peak - shards <= unit


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [8, 256])
def test_copies_are_one_pass_over_the_gradients(world_size: int) -> None:
    """The all-gather needs none; FSDP2 copies more than 2.5 times as much."""
    plain, ours, fsdp2 = (
        traffic.measure(VARIANTS[name], world_size)[0]
        for name in ("plain", "ours", "fsdp2")
    )
    model = Gpt(**traffic.MODEL)
    gradients = sum(p.nbytes for p in model.parameters())

    assert ours.copied - plain.copied == gradients
    assert gradients < 0.4 * (fsdp2.copied - plain.copied)


@pytest.mark.req("U-03")
@pytest.mark.parametrize("world_size", [8, 1024])
def test_bytes_sent_are_the_planned_ones(world_size: int) -> None:
    """Call by call and byte by byte, at any number of ranks."""
    _, calls = traffic.measure(VARIANTS["ours"], world_size)

    assert traffic.recorded_traffic(calls) == traffic.planned_traffic(world_size)


@pytest.mark.parametrize("ranks", [8, 64, 256, 512, 1024])
@pytest.mark.parametrize("unit", [name for name in UNITS if "expert" not in name])
def test_row_blocks_pad_less_than_one_percent(unit: str, ranks: int) -> None:
    """Of each unit of public models, up to 1024 ranks."""
    assert padding(UNITS[unit], ranks) < traffic.GOAL_PADDING


def test_a_step_does_not_grow_with_the_number_of_ranks() -> None:
    """Python makes the same calls and allocations for 8 ranks and for 16,384."""
    few = scale.calls_of_a_step(2, 8, **SMALL)
    many = scale.calls_of_a_step(2, 16384, **SMALL)

    assert few == many
    assert min(few) > 0
