"""Laws of the wire formats: encoding shards equals encoding the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from composable_fsdp.features import Float8Wire, Int8Wire, WireFormat
from composable_fsdp.planning.layout import ParameterSpec, RegionLayout, row_block
from composable_fsdp.planning.partition import plan_regions

FORMATS = [Int8Wire(16), Int8Wire(), Float8Wire()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)


def region_of(
    shapes: list[tuple[int, ...]], wire: WireFormat, ranks: int, dtype: torch.dtype
) -> RegionLayout:
    """The region with most matrices; a plan may split them."""
    specs = [
        ParameterSpec((f"w{i}",), shape, dtype, True, row_block(shape), wire=wire)
        for i, shape in enumerate(shapes)
    ]
    regions = plan_regions(tuple(specs), ranks)
    assert all(region.shard_numel % wire.grid == 0 for region in regions)
    return max(regions, key=lambda region: len(region.parameters))


def gathered(region: RegionLayout, flat: Tensor) -> Tensor:
    """The bytes of all ranks, each encoded from a shard of ``flat``."""
    wire, layout = region.wire, region.wire_layout
    assert wire is not None
    shards = flat.view(region.world_size, -1)
    size = wire.nbytes(layout)
    slices = torch.full((region.world_size, size), 171, dtype=torch.uint8)
    for rank, shard in enumerate(shards):
        wire.encode(shard, slices[rank], layout, rank)
    return slices.view(-1)


def decoded(region: RegionLayout, flat: Tensor, compute: torch.dtype) -> Tensor:
    """The full buffer that every rank computes with."""
    assert region.wire is not None
    full = torch.full((region.padded_numel,), torch.nan, dtype=compute)
    region.wire.decode(gathered(region, flat), full, region.wire_layout)
    return full


def matrices(region: RegionLayout, full: Tensor) -> list[Tensor]:
    """The parameters, as views of the buffer."""
    return [
        full[s.offset : s.offset + s.numel].view(s.shape[0], -1)
        for s in region.parameters
    ]


def reference(region: RegionLayout, flat: Tensor, compute: torch.dtype) -> list[Tensor]:
    """Each matrix encoded and decoded as a whole, without shards."""
    wire: Any = region.wire
    if isinstance(wire, Int8Wire):
        blocks = flat.double().view(-1, wire.block)
        scale = (blocks.abs().amax(1, keepdim=True).float() / 127).double()
        scale[scale == 0] = 1
        steps = (blocks.float() / scale.float()).round()
        whole = (steps.to(compute) * scale.float()).to(compute)
        return matrices(region, whole.view(-1))
    found = []
    for matrix in matrices(region, flat):
        largest = matrix.float().abs().amax(1, keepdim=True)
        scale = torch.where(largest == 0, 1.0, largest / 448)
        steps = (matrix.float() / scale).to(torch.float8_e4m3fn).to(compute)
        found.append((steps.float() * scale).to(compute))
    return found


@pytest.mark.req("M-04")
@given(
    shapes=shapes,
    ranks=st.sampled_from([4, 3, 2, 1]),
    wire=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    compute=st.sampled_from(DTYPES[:2]),
    seed=st.integers(0, 99),
)
@example([(3, 5)], 4, Float8Wire(), torch.float32, torch.float32, 0)
@example([(1, 1)], 3, Int8Wire(), torch.bfloat16, torch.bfloat16, 0)
def test_encoding_shards_equals_encoding_the_whole(
    shapes: list[tuple[int, ...]],
    ranks: int,
    wire: WireFormat,
    dtype: torch.dtype,
    compute: torch.dtype,
    seed: int,
) -> None:
    """Bit by bit, at every number of ranks, in the compute dtype."""
    region = region_of(shapes, wire, ranks, dtype)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(region.padded_numel, dtype=dtype)
    for matrix in matrices(region, flat):
        matrix.copy_(torch.randn(matrix.shape, generator=generator))

    full = decoded(region, flat, compute)

    expected = reference(region, flat, compute)
    for got, want in zip(matrices(region, full), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("wire", FORMATS, ids=repr)
def test_zeros_nans_and_extremes(wire: WireFormat) -> None:
    """Zeros stay zeros, a NaN is seen, and neither end of float32 becomes one."""
    region = region_of([(4, 16)], wire, 2, torch.float32)
    (slot,) = region.parameters
    rows = torch.zeros(4, 16)
    rows[1], rows[2], rows[3, 0] = 3e38, 1e-42, torch.nan
    flat = torch.zeros(region.padded_numel)
    flat[slot.offset : slot.offset + 64] = rows.view(-1)

    got = matrices(region, decoded(region, flat, torch.float32))[0]

    assert bool(got[3].isnan().any())
    # The other format shares a scale between these rows, so the NaN is in all.
    if wire in (Int8Wire(16), Float8Wire()):
        assert bool((got[0] == 0).all())
        assert torch.allclose(got[1], rows[1], rtol=0.01)
        assert bool(got[2].isfinite().all())
    else:
        assert bool(got.isnan().all())


def test_vectors_integers_and_empty_matrices_are_gathered_as_they_are() -> None:
    """A wire format takes floating point matrices."""
    wire = Int8Wire()

    assert wire.takes((4, 4), torch.bfloat16)
    assert wire.takes((2, 3, 4), torch.float32)
    for shape in ((4,), (), (0, 4), (4, 0)):
        assert not wire.takes(shape, torch.float32)
    assert not wire.takes((4, 4), torch.int8)
