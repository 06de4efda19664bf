"""Laws of the flat layout: coverage, equal aligned shards, whole blocks, least cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import combinations, pairwise
from math import lcm

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from composable_fsdp.config import Block
from composable_fsdp.features.changes.adopt import split_region
from composable_fsdp.planning.layout import (
    ParameterSlot,
    ParameterSpec,
    RegionLayout,
    row_block,
    sharded_shape,
)
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.partition import SHARD_ALIGNMENT, plan_regions
from tests.support.strategies import shapes, world_sizes

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.complex128,
)
Layouts = tuple[RegionLayout, ...]


@st.composite
def units(draw: st.DrawFn, max_size: int = 8) -> list[ParameterSpec]:
    """Parameters of one unit: any shape and dtype, whole rows or single elements."""
    one = st.tuples(
        shapes(max_dims=3, max_side=9), st.sampled_from(DTYPES), st.booleans()
    )
    block = draw(st.sampled_from([Block.ROW, *Block, Block.rows(2), Block.rows(5)]))
    options = UnitOptions(block=block)
    return [
        options.spec((f"p{i}",), shape, dtype, trainable, None)
        for i, (shape, dtype, trainable) in enumerate(
            draw(st.lists(one, max_size=max_size))
        )
    ]


@st.composite
def classed_units(
    draw: st.DrawFn, min_classes: int, max_classes: int
) -> list[ParameterSpec]:
    """Matrices of one dtype whose widths are so many different blocks."""
    widths = draw(
        st.lists(
            st.integers(1, 40),
            unique=True,
            min_size=min_classes,
            max_size=max_classes,
        )
    )
    more = draw(st.lists(st.sampled_from(widths), max_size=3))
    return [
        ParameterSpec((f"p{i}",), (rows, w), torch.float32, True, w)
        for i, w in enumerate([*widths, *more])
        for rows in [draw(st.integers(1, 30))]
    ]


def lawful(regions: Layouts, specs: list[ParameterSpec], world_size: int) -> None:
    """Everything that holds for any layout of ``specs``."""
    asked = {spec.fqns[0]: spec for spec in specs}
    names = [slot.fqn for region in regions for slot in region.parameters]
    assert sorted(names) == sorted(asked)
    for region in regions:
        itemsize = region.dtype.itemsize
        assert region.shard_numel * world_size == region.padded_numel
        assert region.shard_numel * itemsize % SHARD_ALIGNMENT == 0
        assert region.numel == sum(slot.numel for slot in region.parameters)
        spans = [(s.offset, s.offset + s.numel) for s in region.parameters]
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= region.padded_numel
        assert all(start * itemsize % SHARD_ALIGNMENT == 0 for start, _ in spans)
        held = Counter[int]()
        for slot in region.parameters:
            spec = asked[slot.fqn]
            assert (spec.dtype, spec.trainable) == (region.dtype, region.trainable)
            held.update(elements(region, slot, spec, world_size))
        sizes, parameters, others = region.cuts
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        gaps = [starts[i] + n for i in others for n in range(sizes[i])]
        assert set(held.values()) <= {1}
        assert sorted([*held, *gaps]) == list(range(region.padded_numel))
        assert sum(sizes) == region.padded_numel
        pieces = [i for i, _ in parameters]
        assert sorted([*pieces, *others]) == list(range(len(sizes)))
        assert [(starts[i], sizes[i]) for i in pieces] == [
            (slot.offset, slot.numel) for slot in region.parameters
        ]


def elements(
    region: RegionLayout, slot: ParameterSlot, spec: ParameterSpec, world_size: int
) -> Iterable[int]:
    """Places in the buffer that the ranks' parts hold, which follow each other."""
    end = rows = 0
    for rank in range(world_size):
        start, stop = region.interval(slot, rank)
        if spec.block == row_block(slot.shape) and world_size > 1:
            got = sharded_shape(
                slot.shape, stop - start, rows=True, world_size=world_size
            )
            assert len(slot.shape) < 2 or got[1:] == slot.shape[1:]
            assert torch.Size(got).numel() == stop - start
            rows += got[0]
        if stop <= start:
            continue
        assert start == end
        end = stop
        at = rank * region.shard_numel + region.shard_offset(slot, rank)
        assert at == slot.offset + start
        if world_size > 1:  # alone a rank holds everything
            assert start % spec.block == 0
            # Rows behind the last whole block of rows are a block, too.
            assert stop % spec.block == 0 or stop == slot.numel
        yield from range(at, at + stop - start)
    assert end == slot.numel
    if rows and len(slot.shape) >= 2 and slot.numel:
        assert rows == slot.shape[0]


@pytest.mark.req("D-05", "X-28", "U-14", "B-25")
@given(specs=units(), world_size=st.one_of(world_sizes(), st.integers(1, 1024)))
@example([], 3)
@example([ParameterSpec(("p",), (), torch.float32, True, 1)], 1024)
@example([ParameterSpec(("p",), (0, 3), torch.float32, True, 3)], 2)
def test_a_layout_is_lawful(specs: list[ParameterSpec], world_size: int) -> None:
    """Shards have one size, of whole blocks of 16 bytes; each element lies in one, and
    each rank's part of a parameter is of whole blocks, which can be seen as rows."""
    lawful(plan_regions(tuple(specs), world_size), specs, world_size)


@pytest.mark.req("M-05")
@given(specs=units(), world_size=st.one_of(world_sizes(), st.integers(2, 64)))
def test_parameters_of_at_most_a_share_lie_on_a_single_rank(
    specs: list[ParameterSpec], world_size: int
) -> None:
    """And their shards have at most twice the elements of a share, up to alignment."""
    specs = [spec._replace(uncut=True) for spec in specs]
    kinds: Counter[tuple[torch.dtype, bool]] = Counter()
    for spec in specs:
        kinds[spec.dtype, spec.trainable] += spec.numel
    for region in plan_regions(tuple(specs), world_size):
        share = -(-kinds[region.dtype, region.trainable] // world_size)
        for slot in region.parameters:
            if world_size > 1 and slot.numel <= share:
                assert len(region.holders(slot)) == 1 or not slot.numel
                aligned = 16 * len(region.parameters) + 16
                assert region.shard_numel <= 2 * share + aligned


# ---- the choice of regions ----------------------------------------------------------


def packed_bytes(specs: list[ParameterSpec], world_size: int, align: int = 4) -> int:
    """Bytes of one region, by the rule of the documentation, written anew.

    Wide blocks first, each at a multiple of its block and of 16 bytes; a shard is a
    multiple of all blocks.
    """
    end, grid = 0, align
    for spec in sorted(specs, key=lambda spec: -spec.block):
        step = lcm(spec.block, align)
        end = -(-end // step) * step + spec.numel
        grid = lcm(grid, spec.block)
    return -(-end // (world_size * grid)) * grid * world_size * 4


@given(
    specs=classed_units(2, 11),
    world_size=st.one_of(st.integers(2, 8), st.integers(2, 1024)),
    launch_bytes=st.sampled_from([0, 64, 1024, 64 * 1024]),
)
@example(
    [
        ParameterSpec(("wide",), (2, 9), torch.float32, True, 9),
        ParameterSpec(("tall",), (9, 6), torch.float32, True, 6),
    ],
    2,
    10**12,
)
def test_no_merge_of_two_regions_and_no_region_per_block_class_is_cheaper(
    specs: list[ParameterSpec], world_size: int, launch_bytes: int
) -> None:
    """Padding bytes plus launches, counted anew; and all laws of a layout hold."""

    def cost_of(parts: Iterable[Collection[int]]) -> int:
        return sum(
            packed_bytes([s for s in specs if s.block in part], world_size)
            + launch_bytes
            for part in parts
        )

    regions = plan_regions(tuple(specs), world_size, launch_bytes=launch_bytes)

    lawful(regions, specs, world_size)
    parts = [frozenset(slot.block for slot in r.parameters) for r in regions]
    cost = sum(region.nbytes + launch_bytes for region in regions)
    assert cost == cost_of(parts) <= cost_of([{spec.block} for spec in specs])
    for one, other in combinations(parts, 2):
        assert cost_of([one, other]) <= cost_of([one | other])
    for region in regions:
        for slot in region.parameters:
            assert region.shard_numel % slot.block == 0


# ---- taking a region apart -------------------------------------------------------


@given(
    specs=units(),
    world_size=world_sizes(),
    cast=st.sampled_from([None, torch.bfloat16, torch.float32]),
    data=st.data(),
)
def test_each_rank_keeps_its_elements_of_each_parameter(
    specs: list[ParameterSpec],
    world_size: int,
    cast: torch.dtype | None,
    data: st.DataObject,
) -> None:
    """Intervals stay, also after a cast; parts are aligned, apart, and no larger."""
    for planned in plan_regions(tuple(specs), world_size):
        layout = planned if cast is None else replace(planned, dtype=cast)
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
            assert part.numel == sum(slot.numel for slot in part.parameters)
            for slot in part.parameters:
                if cast is None and slot.numel:
                    assert slot.offset * item % SHARD_ALIGNMENT == 0
                for rank in range(world_size):
                    old = layout.interval(before[slot.index], rank)
                    assert part.interval(slot, rank) == old
            for one, other in pairwise(part.parameters):
                assert one.offset + one.numel <= other.offset
            last = part.parameters[-1]
            assert last.offset + last.numel <= part.padded_numel
            assert cast or part.shard_numel * item % SHARD_ALIGNMENT == 0
        (flipped,) = split_region(layout, [not layout.trainable] * count)
        (back,) = split_region(flipped, [layout.trainable] * count)
        assert flipped.trainable is not layout.trainable
        assert flipped.parameters == layout.parameters
        assert back == layout
