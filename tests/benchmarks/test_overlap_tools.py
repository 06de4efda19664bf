"""What the overlap benchmarks compute from: the link, the schedule, a trace."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.device_steps import chain_peaks, world
from benchmarks.link_group import link_world
from benchmarks.overlap import simulate
from benchmarks.prefetch_ways import Roberta
from benchmarks.schedule import Event, Schedule, hidden, seconds
from composable_fsdp.comm import collectives
from tests.support import seam

CPU = torch.device("cpu")


def test_every_collective_sends_what_a_ring_would() -> None:
    """All but this rank's part of the whole buffer; twice for an all-reduce."""
    schedule = Schedule()
    part, whole = torch.zeros(3), torch.zeros(12)
    with link_world(4, schedule):
        group = seam.default_group()
        collectives.all_gather_flat([whole], [part], group)
        collectives.all_gather_flat([whole, whole], [part, part], group)
        collectives.reduce_scatter_flat([part], [whole], group)
        collectives.reduce_scatter_flat([part, part], [whole, whole], group)
        collectives.all_reduce(whole, group)
        torch.distributed.all_gather(list(whole.chunk(4)), part)

    sent = [(e.name, e.amount) for e in schedule.events if e.kind == "send"]
    moved = 12 * 4 * 3 / 4
    assert sent == [
        ("all_gather", moved),
        ("all_gather", 2 * moved),
        ("reduce_scatter", moved),
        ("reduce_scatter", 2 * moved),
        ("all_reduce", 2 * moved),
        ("all_gather", moved),
    ]
    assert [e.kind for e in schedule.events] == ["send", "wait"] * 6


def test_streams_run_side_by_side_and_joins_order_them() -> None:
    """Two of compute beside three of sending; then one more behind both."""
    schedule = Schedule()
    schedule.events = [
        Event("compute", 0, "a", 2.0),
        Event("send", 1, "gather", 3.0, key=1),
        Event("wait", 1, key=1),
        Event("mark", 1, key=2),
        Event("join", 0, key=2),
        Event("compute", 0, "b", 1.0),
        Event("block", 0, key=2),
        Event("compute", 2, "after the host waited", 1.0),
    ]

    spans = schedule.times(operations_per_second=1, bytes_per_second=1)

    assert [(s.begin, s.end) for s in spans] == [(0, 2), (0, 3), (3, 4), (3, 4)]
    assert hidden(spans[:3]) == pytest.approx(2 / 3)


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
