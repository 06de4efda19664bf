"""The one seam to torch.distributed's collectives; every call can be recorded.

Each function sends exactly one collective (regions issued together count as one).
Inside ``record`` the gathers and reduce-scatters of flat buffers check sizes and dtypes
first; outside, the backend does. With ``async_op`` a function returns a ``Work`` whose
``wait`` must be called before the result is read; otherwise the result is ordered on
the current stream.

The two calls that every unit makes in every step go to the group's own methods. The
functions of torch.distributed around them check anew each time what a plan has settled
(types, membership, options), which took longer than all of ours around a collective.
Several regions go through the group's coalesced methods, because the coalescing
context manager fails on gloo.

Names checked on torch 2.11 and 2.13, which renamed these methods; chosen here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch.distributed exports the options of the other collectives, not these.
from torch._C._distributed_c10d import AllgatherOptions

from composable_fsdp.errors import FSDPError

_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
_ALL_GATHER = "all_gather_single" if _SINGLE else "_allgather_base"
_ALL_GATHER_COALESCED = (
    "all_gather_single_coalesced" if _SINGLE else "allgather_into_tensor_coalesced"
)
_REDUCE_SCATTER = "reduce_scatter_single" if _SINGLE else "_reduce_scatter_base"
_REDUCE_SCATTER_COALESCED = (
    "reduce_scatter_single_coalesced" if _SINGLE else "reduce_scatter_tensor_coalesced"
)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One collective as this rank sent it: its kind, and elements and dtype per region.

    ``numel`` is that of the whole buffer (``padded_numel``), ``world_size`` the
    group's.
    """

    op: str
    numel: tuple[int, ...]
    dtype: tuple[torch.dtype, ...]
    world_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffers."""
        return sum(n * d.itemsize for n, d in zip(self.numel, self.dtype, strict=True))


_recorder: list[CallRecord] | None = None


@contextmanager
def record() -> Iterator[list[CallRecord]]:
    """Collect the collectives that this process sends inside the block, in order."""
    global _recorder
    outer, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = outer


def _note(op: str, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if _recorder is not None:
        _recorder.append(
            CallRecord(
                op,
                tuple(t.numel() for t in tensors),
                tuple(t.dtype for t in tensors),
                group.size(),
            )
        )


def _require(full: Sequence[Tensor], shard: Sequence[Tensor], size: int) -> None:
    for whole, part in zip(full, shard, strict=True):
        if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
            raise FSDPError(
                f"A collective over {size} ranks expects a full buffer of {size} x "
                f"{part.numel()} {part.dtype}, got {whole.numel()} {whole.dtype}."
            )


def all_gather_flat(
    full: Sequence[Tensor],
    shard: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Fill each ``full`` ``(padded_numel,)`` with the shards of all ranks.

    Rank *r* fills slice *r* with its ``shard`` ``(shard_numel,)``, which may be that
    slice of ``full`` itself.

    Collective: one all-gather over ``group`` (several buffers are coalesced).
    """
    if _recorder is not None:
        _require(full, shard, group.size())
        _note("all_gather", full, group)
    options = AllgatherOptions()
    options.asyncOp = async_op
    if len(full) == 1:
        whole, part = full[0], shard[0]
        if whole.dtype.is_complex:
            whole, part = _as_real([whole, part])
        work = getattr(group, _ALL_GATHER)(whole, part, options)
        return _finish(work, async_op)
    if len({tensor.dtype for tensor in full}) > 1 or full[0].dtype.is_complex:
        # gloo's coalesced gather takes the first dtype for all (seen on torch 2.13); a
        # gather moves bytes, so bytes are what it is given.
        full = [tensor.view(torch.uint8) for tensor in full]
        shard = [tensor.view(torch.uint8) for tensor in shard]
    return _finish(
        getattr(group, _ALL_GATHER_COALESCED)(full, shard, options), async_op
    )


def reduce_scatter_flat(
    shard: Sequence[Tensor],
    full: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    average: bool = False,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum (or average) each ``full`` ``(padded_numel,)`` over the ranks.

    Rank *r* keeps slice *r* in ``shard`` ``(shard_numel,)``. All buffers must have one
    dtype.

    Collective: one reduce-scatter over ``group`` (several buffers are coalesced).
    """
    if _recorder is not None:
        _require(full, shard, group.size())
        _note("reduce_scatter", full, group)
    # The stubs of torch tell the constants from the class that has them.
    op: Any = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    if len(full) == 1:
        whole, part = full[0], shard[0]
        if whole.dtype.is_complex:
            whole, part = _as_real([whole, part])
        work = getattr(group, _REDUCE_SCATTER)(part, whole, options)
        return _finish(work, async_op)
    if full[0].dtype.is_complex:
        full, shard = _as_real(full), _as_real(shard)
    return _finish(
        getattr(group, _REDUCE_SCATTER_COALESCED)(shard, full, options), async_op
    )


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    maximum: bool = False,
    average: bool = False,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum (or take the maximum or average of) ``tensor`` over ranks, in place.

    Collective: one all-reduce over ``group``.
    """
    _note("all_reduce", [tensor], group)
    total = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    op = dist.ReduceOp.MAX if maximum else total
    work: dist.Work | None = dist.all_reduce(
        tensor, op=op, group=group, async_op=async_op
    )
    return work


def gather_flat(
    full: Tensor | None, shard: Tensor, group: dist.ProcessGroup, *, rank: int = 0
) -> None:
    """Fill ``full`` ``(padded_numel,)`` on group rank ``rank`` with all ``shard``.

    The other ranks pass ``None`` and hold no more than their shard.

    Collective: one gather over ``group``.
    """
    _note("gather", [shard], group)
    first = dist.get_global_rank(group, rank)
    dist.gather(shard.view(torch.uint8), _parts(full, group), dst=first, group=group)


def scatter_flat(
    shard: Tensor, full: Tensor | None, group: dist.ProcessGroup, *, rank: int = 0
) -> None:
    """Give every rank its slice of group rank ``rank``'s ``full`` ``(padded_numel,)``.

    Collective: one scatter over ``group``.
    """
    _note("scatter", [shard], group)
    first = dist.get_global_rank(group, rank)
    dist.scatter(shard.view(torch.uint8), _parts(full, group), src=first, group=group)


def _parts(full: Tensor | None, group: dist.ProcessGroup) -> list[Tensor] | None:
    # As bytes: gloo gathers and scatters no complex numbers.
    return None if full is None else list(full.view(torch.uint8).chunk(group.size()))


def broadcast(tensor: Tensor, group: dist.ProcessGroup, *, rank: int = 0) -> None:
    """Copy group rank ``rank``'s ``tensor`` to every rank, in place.

    Collective: one broadcast over ``group``.
    """
    _note("broadcast", [tensor], group)
    dist.broadcast(tensor, src=dist.get_global_rank(group, rank), group=group)


def broadcast_object(value: object, group: dist.ProcessGroup, *, rank: int = 0) -> Any:
    """Return group rank ``rank``'s picklable ``value``; the others' is not looked at.

    Collective: a broadcast of the size and one of bytes over ``group``; not for the
    steady state.
    """
    if _recorder is not None:
        _recorder.append(CallRecord("broadcast_object", (), (), group.size()))
    values = [value]
    dist.broadcast_object_list(
        values, src=dist.get_global_rank(group, rank), group=group
    )
    return values[0]


def all_gather_object(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's picklable ``value``, in group rank order.

    Collective: a gather of sizes and one of bytes over ``group``; not for the steady
    state.
    """
    if _recorder is not None:
        _recorder.append(CallRecord("all_gather_object", (), (), group.size()))
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(
    value: object, group: dist.ProcessGroup, *, rank: int = 0
) -> list[Any] | None:
    """Return every rank's picklable ``value`` on group rank ``rank``, None elsewhere.

    Collective: a gather of sizes and one of bytes over ``group``; not for the steady
    state.
    """
    if _recorder is not None:
        _recorder.append(CallRecord("gather_object", (), (), group.size()))
    values: list[Any] | None = [None] * group.size() if group.rank() == rank else None
    dist.gather_object(
        value, values, dst=dist.get_global_rank(group, rank), group=group
    )
    return values


def _as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex numbers as pairs of real ones: backends have no complex numbers."""
    return [torch.view_as_real(tensor) for tensor in tensors]


def _finish(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None
