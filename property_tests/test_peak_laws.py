"""Buffers of a step beside parameters, gradients and states: at most three units."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composable_fsdp import BackwardPrefetch, ShardingStrategy
from tests.planning.test_peak_memory import POST, PRE, Chain, peak_of


@pytest.mark.req("M-07", "S2-02")
@settings(max_examples=12, deadline=None)
@given(
    widths=st.lists(st.sampled_from([512, 1024, 1536, 2048]), min_size=4, max_size=7),
    world_size=st.sampled_from([2, 8, 64]),
    mode=st.sampled_from([PRE, POST, None]),
    strategy=st.sampled_from(
        [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD]
    ),
    ahead=st.booleans(),
    order=st.sampled_from(["cpu", "cuda"]),
)
@example([2048] * 6, 8, PRE, ShardingStrategy.FULL_SHARD, False, "cuda")
@example([2048] * 6, 8, None, ShardingStrategy.FULL_SHARD, False, "cpu")
def test_a_step_holds_the_memory_of_three_units(
    widths: list[int],
    world_size: int,
    mode: BackwardPrefetch | None,
    strategy: ShardingStrategy,
    ahead: bool,
    order: str,
) -> None:
    """Beside parameters and gradients of this rank: three of the largest; two without
    prefetch. Reduced in the dtype of compute."""
    options: dict[str, Any] = {"backward_prefetch": mode, "forward_prefetch": ahead}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["shard_world_size"] = world_size // 2 if world_size > 2 else 2

    peak, measured, largest = peak_of(
        partial(Chain, *widths), world_size, order, strategy=strategy, **options
    )

    transient = peak.full + peak.reduce + peak.in_flight
    assert peak.total == pytest.approx(measured, rel=0.01)
    assert transient <= (2 if mode is None else 3) * largest
