"""What the overlap benchmarks find on a small model."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.device_steps import chain_peaks, world
from benchmarks.overlap import simulate
from benchmarks.prefetch_ways import Roberta
from benchmarks.schedule import seconds

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
