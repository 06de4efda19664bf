"""Wire formats: how an all-gather sends matrices, encoded in fewer bytes.

A rank's slice holds values, then scales. Source of the block-wise format: ZeRO++ (Wang
et al., arXiv:2306.10209, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from composable_fsdp.comm.wire_format import WireFormat, WireLayout

_ALIGNMENT = 16
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max
_INT8_MAX = 127.0
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Int8Wire(WireFormat):
    """Sends matrices as int8, with a scale in float32 per block of elements.

    A block is an interval of the flat buffer. The largest magnitude of a block becomes
    127, so the error of an element is at most the largest magnitude divided by 254.

    Args:
        block: elements per block. Default 128: 1.03 bytes per element.

    Raises: ValueError, if ``block`` is no multiple of 16.
    """

    block: int = 128

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 16 or self.block % 16:
            raise ValueError(
                f"Int8Wire(block=...) expects a multiple of 16, got {self.block!r}."
            )

    @property
    def grid(self) -> int:  # type: ignore[override]  # read only here
        """The elements of a block, which no shard boundary cuts."""
        return self.block

    def nbytes(self, layout: WireLayout) -> int:
        """Return the bytes of a rank's slice; see ``WireFormat``."""
        return int8_nbytes(layout.shard_numel, self.block)

    def scratch_nbytes(self, layout: WireLayout, dtype: torch.dtype) -> int:
        """Return the bytes of temporary tensors; see ``WireFormat``."""
        scales = layout.shard_numel // self.block
        return _scratch(layout.shard_numel, dtype) + 2 * _SCALE_BYTES * scales

    def encode(self, shard: Tensor, out: Tensor, layout: WireLayout, rank: int) -> None:
        """Write a shard into the wire; see ``WireFormat``."""
        encode_int8(shard[None], out[None], self.block)

    def decode(self, wire: Tensor, full: Tensor, layout: WireLayout) -> None:
        """Write the elements of all ranks; see ``WireFormat``."""
        slices = wire.view(layout.world_size, -1)
        decode_int8(slices, full.view(layout.world_size, -1), self.block)


@dataclass(frozen=True)
class Float8Wire(WireFormat):
    """Sends matrices as float8 (e4m3), with a scale in float32 per row.

    Values do not depend on the number of ranks.
    """

    needs_rows = True

    def nbytes(self, layout: WireLayout) -> int:
        """Return the bytes of a rank's slice; see ``WireFormat``."""
        return _slice_bytes(layout.shard_numel, _most_rows(layout))

    def scratch_nbytes(self, layout: WireLayout, dtype: torch.dtype) -> int:
        """Return the bytes of temporary tensors; see ``WireFormat``."""
        # Matrices are encoded in turn.
        most = max(rows * width for _, rows, width in layout.matrices)
        return _scratch(min(most, layout.shard_numel), dtype)

    def encode(self, shard: Tensor, out: Tensor, layout: WireLayout, rank: int) -> None:
        """Write a shard into the wire; see ``WireFormat``."""
        # Padding, and scales of rows that other ranks have more of, are zeros.
        out.zero_()
        values, scales = _split(out, layout.shard_numel, _most_rows(layout))
        encoded = values.view(_FLOAT8)
        done = 0
        for index, first, last in layout.parts(rank):
            offset, _, width = layout.matrices[index]
            begin = offset + first * width - rank * layout.shard_numel
            end, count = begin + (last - first) * width, last - first
            rows = shard[begin:end].view(count, width).float()
            scale = scales[done : done + count]
            _set_scales(scale, rows.abs().amax(1), _FLOAT8_MAX)
            done += count
            # The quotient is at most the largest float8 up to a rounding, which the
            # cast rounds back; torch's cast does not saturate.
            encoded[begin:end].view(count, width).copy_(rows / scale.view(-1, 1))

    def decode(self, wire: Tensor, full: Tensor, layout: WireLayout) -> None:
        """Write the elements of all ranks; see ``WireFormat``."""
        slices = wire.view(layout.world_size, -1)
        values, scales = _split(slices, layout.shard_numel, _most_rows(layout))
        # One cast for all ranks; the scales follow in place, in float32 (an operator
        # of a bfloat16 and a float32 tensor computes in float32).
        full.view(layout.world_size, -1).copy_(values.view(_FLOAT8))
        # An operator per matrix, and not per matrix and rank.
        found = scales.reshape(-1)[_places(layout, scales)]
        at = 0
        for offset, rows, width in layout.matrices:
            part = full[offset : offset + rows * width].view(rows, width)
            part.mul_(found[at : at + rows, None])
            at += rows


def encode_int8(values: Tensor, out: Tensor, block: int) -> None:
    """Write each row of ``values`` as int8 with a scale per block."""
    number = values.shape[1] // block
    steps, scales = _split(out, values.shape[1], number)
    blocks = values.float().unflatten(1, (number, block))  # type: ignore[no-untyped-call]  # of torch
    # ``amax`` of a block with NaN is NaN, so the whole block decodes to NaN and the
    # loss shows the NaN; integers alone could not hold the value.
    _set_scales(scales, blocks.abs().amax(2), _INT8_MAX)
    blocks = (blocks / scales[:, :, None]).round_()
    steps.view(torch.int8).view(blocks.shape).copy_(blocks)


def decode_int8(encoded: Tensor, values: Tensor, block: int) -> None:
    """Write the values of ``encode_int8`` into ``values``."""
    number = values.shape[1] // block
    steps, scales = _split(encoded, values.shape[1], number)
    # In place, so that decoding needs no memory beside ``values``.
    blocks = values.view(values.shape[0], number, block)
    blocks.copy_(steps.view(torch.int8).view(blocks.shape))
    blocks.mul_(scales[:, :, None])


def int8_nbytes(numel: int, block: int) -> int:
    """Return the bytes of ``numel`` elements as int8 with a scale per block."""
    return _slice_bytes(numel, numel // block)


def _set_scales(scales: Tensor, largest: Tensor, most: float) -> None:
    """Set the scales with which the values ``largest`` become ``most``."""
    scales.copy_(largest / most)
    # A quotient of zero and zero is NaN; subnormal scales lose precision, and the
    # quotient may overflow.
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)


def _scratch(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a quotient in float32, and of a copy in float32 if needed."""
    return 4 * numel if dtype == torch.float32 else 8 * numel


def _slice_bytes(numel: int, scales: int) -> int:
    """Return the bytes of a slice with ``numel`` values and ``scales`` scales."""
    return _aligned(numel) + _aligned(scales * _SCALE_BYTES)


def _split(slices: Tensor, numel: int, scales: int) -> tuple[Tensor, Tensor]:
    """Return the values in uint8 and the scales in float32 of one or more slices."""
    # A view in float32 needs an offset that is a multiple of 4 bytes.
    begin = _aligned(numel)
    end = begin + scales * _SCALE_BYTES
    return slices[..., :numel], slices[..., begin:end].view(torch.float32)


def _aligned(nbytes: int) -> int:
    """Return the smallest multiple of the alignment that holds ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=1024)
def _most_rows(layout: WireLayout) -> int:
    """Return the largest number of rows that a rank holds."""
    return max(
        sum(last - first for _, first, last in layout.parts(rank))
        for rank in range(layout.world_size)
    )


def _places(layout: WireLayout, scales: Tensor) -> Tensor:
    """Return the index, among the scales of all ranks, of each row of each matrix."""
    # A fake tensor must not reach a later step, nor a real tensor a simulated step.
    if type(scales) is not Tensor:
        return _make_places(layout, scales.device)
    return _known_places(layout, scales.device)


def _make_places(layout: WireLayout, device: torch.device) -> Tensor:
    """Compute ``_places``."""
    most = _most_rows(layout)
    found: list[list[int]] = [[] for _ in layout.matrices]
    for rank in range(layout.world_size):
        at = rank * most
        for index, first, last in layout.parts(rank):
            found[index] += range(at, at + last - first)
            at += last - first
    # Made outside of inference mode, because later calls get the same tensor.
    with torch.inference_mode(False):
        return torch.tensor([each for rows in found for each in rows], device=device)


_known_places = lru_cache(maxsize=1024)(_make_places)
