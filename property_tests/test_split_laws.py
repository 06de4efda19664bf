"""Laws of taking a region apart: every rank keeps its elements, and nothing grows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.planning.layout import ParameterSpec, plan_regions
from composable_fsdp.planning.partition import SHARD_ALIGNMENT
from composable_fsdp.planning.split import split_region
from property_tests.test_layout_laws import units
from tests.support.strategies import world_sizes


@given(specs=units(), world_size=world_sizes(), data=st.data())
def test_each_rank_keeps_its_elements_of_each_parameter(
    specs: list[ParameterSpec], world_size: int, data: st.DataObject
) -> None:
    """Intervals stay, parts do not overlap, are aligned, and are no larger."""
    for layout in plan_regions(specs, world_size=world_size):
        count = len(layout.parameters)
        flags = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))

        parts = split_region(layout, flags)

        before = {slot.index: slot for slot in layout.parameters}
        wanted = {s.index: f for s, f in zip(layout.parameters, flags, strict=True)}
        found = {s.index: p.trainable for p in parts for s in p.parameters}
        assert found == wanted
        for part in parts:
            item = part.dtype.itemsize
            assert part.padded_numel == part.shard_numel * world_size
            assert part.shard_numel <= layout.shard_numel
            assert part.shard_numel * item % SHARD_ALIGNMENT == 0
            assert part.numel == sum(slot.numel for slot in part.parameters)
            for slot in part.parameters:
                assert not slot.numel or slot.offset * item % SHARD_ALIGNMENT == 0
                for rank in range(world_size):
                    old = layout.interval(before[slot.index], rank)
                    assert part.interval(slot, rank) == old
            for one, other in pairwise(part.parameters):
                assert one.offset + one.numel <= other.offset
            last = part.parameters[-1]
            assert last.offset + last.numel <= part.padded_numel


@given(specs=units(), world_size=world_sizes(), data=st.data())
def test_each_rank_keeps_its_elements_after_a_cast(
    specs: list[ParameterSpec], world_size: int, data: st.DataObject
) -> None:
    """Parameters that were cast keep their cuts, aligned for the dtype they had."""
    for planned in plan_regions(specs, world_size=world_size):
        dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
        layout = replace(planned, dtype=dtype)
        count = len(layout.parameters)
        flags = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))

        parts = split_region(layout, flags)

        before = {slot.index: slot for slot in layout.parameters}
        for part in parts:
            assert part.shard_numel <= layout.shard_numel
            for slot in part.parameters:
                for rank in range(world_size):
                    old = layout.interval(before[slot.index], rank)
                    assert part.interval(slot, rank) == old


@given(specs=units(), world_size=world_sizes())
def test_a_region_that_changes_as_a_whole_keeps_its_layout(
    specs: list[ParameterSpec], world_size: int
) -> None:
    """Only the flag changes, and back again."""
    for layout in plan_regions(specs, world_size=world_size):
        count = len(layout.parameters)
        (flipped,) = split_region(layout, [not layout.trainable] * count)
        (back,) = split_region(flipped, [layout.trainable] * count)

        assert flipped.trainable is not layout.trainable
        assert flipped.parameters == layout.parameters
        assert back == layout
