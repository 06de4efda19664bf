"""The only module that calls collectives of torch.distributed; calls can be recorded.

Each function sends a single collective (regions that are issued together count as a
single collective); the ``_object`` functions send the sizes first. With
``async_op=True`` a function returns a ``Work`` whose ``wait`` must be called before the
result is read; otherwise the current stream is ordered after the collective.

Names of ``ProcessGroup`` methods were checked on torch 2.11 and 2.13, which renamed the
methods; this module chooses the names at import.
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

# ``all_gather_flat`` and ``reduce_scatter_flat`` run for every unit in every step, so
# these functions call methods of the process group directly. The public functions of
# torch.distributed check types, membership and options in every call, although a plan
# has settled all of this; the checks took longer than all code of this package around a
# collective. Several regions use the coalesced methods of the group, because torch's
# coalescing context manager fails on gloo.
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
    """A collective as this rank sent it."""

    op: str
    """The kind: the name of the function of this module, without ``_flat``."""
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


_recorder: list[CallRecord] | None = None


@contextmanager
def record() -> Iterator[list[CallRecord]]:
    """Collect the collectives that this process sends inside the block, in order.

    Inside the block, all_gather_flat and reduce_scatter_flat also check sizes and
    dtypes, and raise FSDPError. Outside, only the backend checks. A nested block hides
    its collectives from the outer block.
    """
    global _recorder
    # A nested block replaces the recording, so the outer block misses its calls.
    outer, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = outer


def _note(op: str, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Append a collective to the recording, if a recording is active."""
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
    """Raise FSDPError unless ``full`` has ``size`` times the elements of ``shard``."""
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
    """Fill each full buffer with the shards of all ranks of ``group``, in rank order.

    Args:
        full: output buffers ``(padded_numel,)``, in region order.
        shard: input buffers ``(shard_numel,)``, aligned with ``full``. A shard may be
            this rank's slice of ``full`` itself.
        group: the shard group.
        async_op: return a ``Work`` instead of ordering the current stream. Default:
            False.

    Returns: the ``Work`` if ``async_op``, else None.
    Collective: an all-gather over ``group`` (several buffers are coalesced); every
    rank must call.
    """
    # The sizes are checked only while recording, as in tests; in training the backend
    # checks.
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
    # gloo's coalesced all-gather uses the dtype of the first buffer for all buffers
    # (seen on torch 2.13). An all-gather only moves bytes, so the buffers are passed as
    # bytes.
    if len({tensor.dtype for tensor in full}) > 1 or full[0].dtype.is_complex:
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
    """Sum (or average) each full buffer over the ranks; rank *r* keeps slice *r*.

    Args:
        shard: output buffers ``(shard_numel,)``, in region order.
        full: input buffers ``(padded_numel,)``, aligned with ``shard``. All buffers
            must have the same dtype.
        group: the shard group.
        average: divide the sum by the number of ranks. Default: False.
        async_op: return a ``Work`` instead of ordering the current stream. Default:
            False.

    Returns: the ``Work`` if ``async_op``, else None.
    Collective: a reduce-scatter over ``group`` (several buffers are coalesced); every
    rank must call.
    """
    if _recorder is not None:
        _require(full, shard, group.size())
        _note("reduce_scatter", full, group)
    # Torch's stubs give the constants another type than the class ``ReduceOp``.
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
    # Bytes would be wrong here, because a reduction adds numbers.
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
    """Sum ``tensor`` over the ranks, in place; or take the maximum or the average.

    Args:
        tensor: input and output.
        group: the process group.
        maximum: take the maximum, whatever ``average`` says. Default: False.
        average: divide the sum by the number of ranks. Default: False.
        async_op: return a ``Work`` instead of ordering the current stream. Default:
            False.

    Returns: the ``Work`` if ``async_op``, else None.
    Collective: an all-reduce over ``group``; every rank must call.
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
    """Fill ``full`` on a single rank with the shards of all ranks, in rank order.

    Args:
        full: output buffer ``(padded_numel,)`` on ``rank``; None on the other ranks,
            which hold no more than their shard.
        shard: input buffer ``(shard_numel,)``.
        group: the shard group.
        rank: group rank that receives. Default: 0.

    Collective: a gather over ``group``; every rank must call.
    """
    _note("gather", [shard], group)
    # torch.distributed expects the global rank of the receiver.
    first = dist.get_global_rank(group, rank)
    dist.gather(shard.view(torch.uint8), _parts(full, group), dst=first, group=group)


def scatter_flat(
    shard: Tensor, full: Tensor | None, group: dist.ProcessGroup, *, rank: int = 0
) -> None:
    """Give every rank its slice of the full buffer of a single rank.

    Args:
        shard: output buffer ``(shard_numel,)``.
        full: input buffer ``(padded_numel,)`` on ``rank``; None on the other ranks.
        group: the shard group.
        rank: group rank that sends. Default: 0.

    Collective: a scatter over ``group``; every rank must call.
    """
    _note("scatter", [shard], group)
    # torch.distributed expects the global rank of the sender.
    first = dist.get_global_rank(group, rank)
    dist.scatter(shard.view(torch.uint8), _parts(full, group), src=first, group=group)


def _parts(full: Tensor | None, group: dist.ProcessGroup) -> list[Tensor] | None:
    """Split a full buffer into the ranks' slices, as bytes; None stays None."""
    # Bytes, because gloo cannot gather or scatter complex numbers.
    return None if full is None else list(full.view(torch.uint8).chunk(group.size()))


def broadcast(tensor: Tensor, group: dist.ProcessGroup, *, rank: int = 0) -> None:
    """Copy ``tensor`` of a single rank to every rank, in place.

    Args:
        tensor: input on ``rank``, output on the other ranks.
        group: the process group.
        rank: group rank that sends. Default: 0.

    Collective: a broadcast over ``group``; every rank must call.
    """
    _note("broadcast", [tensor], group)
    dist.broadcast(tensor, src=dist.get_global_rank(group, rank), group=group)


def broadcast_object(value: object, group: dist.ProcessGroup, *, rank: int = 0) -> Any:
    """Return the value of a single rank on every rank. Not for the steady state.

    Args:
        value: a picklable object on ``rank``; ignored on the other ranks.
        group: the process group.
        rank: group rank that sends. Default: 0.

    Returns: the value of ``rank``.
    Collective: a broadcast of the size and a broadcast of the bytes over ``group``;
    every rank must call.
    """
    if _recorder is not None:
        _recorder.append(CallRecord("broadcast_object", (), (), group.size()))
    # Every rank must pass a list of the same length; the contents of the other ranks
    # are overwritten.
    values = [value]
    dist.broadcast_object_list(
        values, src=dist.get_global_rank(group, rank), group=group
    )
    return values[0]


def all_gather_object(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's picklable ``value``, in group rank order.

    Not for the steady state.

    Collective: an all-gather of the sizes and an all-gather of the bytes over
    ``group``; every rank must call.
    """
    if _recorder is not None:
        _recorder.append(CallRecord("all_gather_object", (), (), group.size()))
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(
    value: object, group: dist.ProcessGroup, *, rank: int = 0
) -> list[Any] | None:
    """Return the values of all ranks on a single rank. Not for the steady state.

    Args:
        value: a picklable object.
        group: the process group.
        rank: group rank that receives. Default: 0.

    Returns: the values in group rank order on ``rank``; None on the other ranks.
    Collective: an all-gather of the sizes and a gather of the bytes over ``group``;
    every rank must call.
    """
    if _recorder is not None:
        _recorder.append(CallRecord("gather_object", (), (), group.size()))
    # Only the receiver may pass an output list.
    values: list[Any] | None = [None] * group.size() if group.rank() == rank else None
    dist.gather_object(
        value, values, dst=dist.get_global_rank(group, rank), group=group
    )
    return values


def _as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """View complex tensors as pairs of real numbers."""
    # The backends have no complex numbers. A sum of complex numbers is the sum of both
    # components, so reductions are correct, too.
    return [torch.view_as_real(tensor) for tensor in tensors]


def _finish(work: dist.Work, async_op: bool) -> dist.Work | None:
    """Return ``work`` to an asynchronous caller; wait for ``work`` otherwise."""
    if async_op:
        return work
    # Some backends return no ``Work`` for a synchronous call.
    if work is not None:
        work.wait()
    return None
