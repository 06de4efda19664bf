"""What the benchmarks show is true of small models, too."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import llama, memory, scale, traffic
from benchmarks.device_steps import chain_peaks, world
from benchmarks.models import Gpt
from benchmarks.overlap import simulate
from benchmarks.prefetch_ways import Roberta
from benchmarks.schedule import seconds
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


CPU = torch.device("cpu")


def test_prefetch_gains_on_a_slow_network_and_costs_no_traffic() -> None:
    """The same bytes and operations; faster where both take about as long. FSDP1 gains
    as much, but for the one all-gather after the turn to backward."""
    make = partial(Roberta, 3, 64, 100)
    found = simulate(make, (2, 16), ["ours PRE", "ours none", "fsdp1 PRE"])

    def total(name: str, kind: str) -> float:
        events = found[name].schedule.events
        return sum(e.amount for e in events if e.kind == kind)

    def took(name: str) -> float:
        spans = found[name].schedule.times(
            operations_per_second=total(name, "compute"),
            bytes_per_second=total(name, "send"),
        )
        return seconds(spans)

    for kind in ("send", "compute"):
        assert total("ours PRE", kind) == total("ours none", kind) > 0
    assert took("ours PRE") < 0.9 * took("ours none")
    sent = [e.amount for e in found["ours PRE"].schedule.events if e.kind == "send"]
    assert took("ours PRE") < took("fsdp1 PRE") + max(sent) / sum(sent)


@pytest.mark.parametrize("kind", ["one", "fake"])
def test_peaks_are_constant_and_planned(kind: str) -> None:
    """What the GPU benchmark asks of an allocator, asked here of a count."""
    with world(kind, CPU) as size:
        found, planned = chain_peaks(256, CPU, size, steps=3)

    assert found.varies == 0
    assert found.most == pytest.approx(planned.total, rel=0.01)


def test_the_parameters_are_those_of_llama_3_8b() -> None:
    """In all, and without the embedding, which multiplies nothing."""
    with torch.device("meta"):
        model = llama.Llama(llama.Shape(), 32)

    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert llama.Shape().parameters == 8_030_261_248 - 128256 * 4096


def test_the_command_prints_a_row_for_each_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a tiny size on the CPU."""
    options = ["--device", "cpu", "--small", "--how", "eager", "--rounds", "1"]
    assert llama.main(options) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row for row in rows if row and row[0] in ("plain", *llama.NAMES)}
    assert set(found) == {"plain", *llama.NAMES}
    # What is extrapolated from two tiny depths may be anything.
    assert all(float(found[name][1]) > 0 for name in llama.NAMES)
