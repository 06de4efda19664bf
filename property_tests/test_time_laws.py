"""The time of a step lies between its longest part and the sum of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp import BackwardPrefetch, plan
from composable_fsdp.tools import Machine, measure_activations
from tests.planning.test_peak_memory import POST, PRE, Chain


@pytest.mark.req("N-13")
@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.sampled_from([64, 1024, 2048]), min_size=3, max_size=6),
    world_size=st.sampled_from([1, 2, 8, 64]),
    mode=st.sampled_from([PRE, POST, None]),
    ahead=st.booleans(),
    link=st.sampled_from([1e6, 1e9, 1e12]),
    rate=st.sampled_from([1e9, 1e12]),
    node_size=st.sampled_from([1, 8]),
)
def test_overlap_hides_at_most_the_shorter_part(
    widths: list[int],
    world_size: int,
    mode: BackwardPrefetch | None,
    ahead: bool,
    link: float,
    rate: float,
    node_size: int,
) -> None:
    """And no faster link or processor makes a step slower."""
    with torch.device("meta"):
        model = Chain(*widths)
    planned = plan(
        model,
        world_size=world_size,
        units=["layers.*"],
        backward_prefetch=mode,
        forward_prefetch=ahead,
    )
    batch = torch.zeros(256, widths[0])
    activations = measure_activations(model, planned, [batch])
    machine = Machine(rate, link_bytes_per_second=link, node_size=node_size)
    traffic = planned.traffic
    calls = traffic.all_gather_calls + traffic.reduce_scatter_calls
    nbytes = traffic.all_gather_bytes + traffic.reduce_scatter_bytes
    sent = calls * machine.collective(0, world_size)
    sent += machine.collective(nbytes, world_size)

    found = planned.step_time(machine, activations)

    assert max(found.computing, sent) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= (found.computing + sent) * (1 + 1e-9)
    for faster in ("operations_per_second", "link_bytes_per_second"):
        better = replace(machine, **{faster: 10 * getattr(machine, faster)})
        quicker = planned.step_time(better, activations)
        assert quicker.seconds <= found.seconds * (1 + 1e-9)
