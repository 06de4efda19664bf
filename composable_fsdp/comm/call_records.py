"""Records of collectives as a rank sent them, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composable_fsdp.errors import FSDPError


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A collective as this rank sent it."""

    op: str
    """The kind: the name of the function of ``collectives``, without ``_flat``."""
    numel: tuple[int, ...]
    """Elements per buffer: of the full buffer (``padded_numel``) for all_gather and
    reduce_scatter, of the shard for gather and scatter, of the tensor for all_reduce
    and broadcast; empty for objects."""
    dtype: tuple[torch.dtype, ...]
    """Dtype per buffer; empty for objects."""
    world_size: int
    """Number of ranks of the group."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that ``numel`` counts."""
        return sum(n * d.itemsize for n, d in zip(self.numel, self.dtype, strict=True))


def require_sizes(full: Sequence[Tensor], shard: Sequence[Tensor], size: int) -> None:
    """Check that the buffers of a collective fit each other.

    Raises: FSDPError, unless ``full`` has ``size`` times the elements of ``shard``.
    """
    for whole, part in zip(full, shard, strict=True):
        if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
            raise FSDPError(
                f"A collective over {size} ranks expects a full buffer of {size} x "
                f"{part.numel()} {part.dtype}, got {whole.numel()} {whole.dtype}."
            )
