"""The only module that calls collectives of torch.distributed; calls can be recorded.

Each function sends a single collective over ``group``, whose ranks must all call; the
``_object`` functions send the sizes first. With ``async_op=True`` it returns an
``Operation`` to wait for. All raise CollectiveError if the backend raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch.distributed exports the options of the other collectives, not these.
from torch._C._distributed_c10d import AllgatherOptions

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.comm.operations import NOTED, Operation, begin

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

# NCCL has no integers of 16 bits, and no backend has complex numbers.
_AS_IS = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    | {torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""Dtypes that every backend can send; buffers of other dtypes are sent as bytes."""


def _options(kind: Callable[[], Any], **fields: Any) -> Any:
    """Return options of a collective with ``fields`` set."""
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


# Made once: backends read them, and to make them takes as long as to issue a collective
# of a unit. Torch's stubs give the constants another type than the class ``ReduceOp``.
_OPS: tuple[Any, Any] = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_GATHER = [_options(AllgatherOptions, asyncOp=a) for a in (False, True)]
_SCATTER = [
    [_options(dist.ReduceScatterOptions, reduceOp=op, asyncOp=a) for a in (False, True)]
    for op in _OPS
]
"""Options of all-gathers by ``async_op``; of reduce-scatters by ``average`` before."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A collective as this rank sent it, for tests and benchmarks."""

    op: str
    numel: tuple[int, ...]
    """Elements per buffer, the full one or else the shard; empty for objects."""
    dtype: tuple[torch.dtype, ...]
    """Dtype per buffer; empty for objects."""
    world_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that ``numel`` counts."""
        return sum(n * d.itemsize for n, d in zip(self.numel, self.dtype, strict=True))


@contextmanager
def record() -> Iterator[list[CallRecord]]:
    """Collect the collectives of the block in order, hidden from an outer block."""
    found: list[CallRecord] = []

    def note(operation: Operation, tensors: Sequence[Tensor]) -> None:
        # A tag moves no data of the model.
        if operation.op != TAG:
            numel = tuple(t.numel() for t in tensors)
            dtypes = tuple(t.dtype for t in tensors)
            found.append(CallRecord(operation.op, numel, dtypes, operation.log.size))

    NOTED.append(note)
    try:
        yield found
    finally:
        NOTED.remove(note)


def all_gather_flat(
    full: Sequence[Tensor],
    shard: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
    operation: Operation | None = None,
) -> Operation | None:
    """Fill each full buffer with the shards of all ranks, in rank order."""
    operation = operation or begin("all_gather", group, full)
    options = _GATHER[async_op]
    several = len(full) > 1
    # gloo's coalesced all-gather uses the dtype of the first buffer for all buffers
    # (seen on torch 2.13). An all-gather only moves bytes.
    if full[0].dtype not in _AS_IS or (several and len({t.dtype for t in full}) > 1):
        full = [tensor.view(torch.uint8) for tensor in full]
        shard = [tensor.view(torch.uint8) for tensor in shard]
    call: Callable[..., Any] = getattr(group, _ALL_GATHER)
    if not several:
        return operation.send(call, full[0], shard[0], options, async_op=async_op)
    # gloo's coalesced all-gather reads CUDA tensors as host memory: SIGSEGV
    # (pytorch#152645).
    if full[0].is_cuda and not operation.log.is_nccl:
        pairs = list(zip(full, shard, strict=True))
        return operation.send(_call_each, call, pairs, options, async_op=async_op)
    call = getattr(group, _ALL_GATHER_COALESCED)
    return operation.send(call, full, shard, options, async_op=async_op)


def reduce_scatter_flat(
    shard: Sequence[Tensor],
    full: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    average: bool = False,
    overwrite: bool = False,
    async_op: bool = False,
    operation: Operation | None = None,
) -> Operation | None:
    """Sum (or average) each full buffer over the ranks; rank *r* keeps slice *r*."""
    operation = operation or begin("reduce_scatter", group, full)
    # Bytes would be wrong here, because a reduction adds numbers.
    if full[0].dtype.is_complex:
        full, shard = _as_real(full), _as_real(shard)
    # Only gloo's waits have a limit.
    if operation.patience:
        args = group.rank(), shard, full, _OPS[average], overwrite
        start = _all_reduce_slices
        return operation.send(start, group.allreduce, *args, async_op=async_op)
    options = _SCATTER[average][async_op]
    call: Callable[..., Any] = getattr(group, _REDUCE_SCATTER)
    if len(full) == 1:
        return operation.send(call, shard[0], full[0], options, async_op=async_op)
    call = getattr(group, _REDUCE_SCATTER_COALESCED)
    return operation.send(call, shard, full, options, async_op=async_op)


def all_reduce(
    tensors: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    maximum: bool = False,
    average: bool = False,
    async_op: bool = False,
    operation: Operation | None = None,
) -> Operation | None:
    """Sum each tensor over the ranks, in place; or take the maximum or the average."""
    given: Any = [tensors] if isinstance(tensors, Tensor) else tensors
    operation = operation or begin("all_reduce", group, given)
    coalesced = len(given) > 1 and operation.log.coalesces
    kind = dist.AllreduceCoalescedOptions if coalesced else dist.AllreduceOptions
    op = dist.ReduceOp.MAX if maximum else _OPS[average]
    options = _options(kind, reduceOp=op, asyncOp=async_op)
    # The components of complex numbers are summed one by one.
    if given[0].is_complex():
        given = _as_real(given)
    if coalesced:
        start = group.allreduce_coalesced
        return operation.send(start, given, options, async_op=async_op)
    # gloo adds coalesced tensors in another order: a sum would depend on the number of
    # regions.
    each = [([tensor],) for tensor in given]
    start = group.allreduce
    return operation.send(_call_each, start, each, options, async_op=async_op)


class _Works:
    """A ``Work`` over several calls, whose wait also copies results, if any."""

    __slots__ = ("_outputs", "_results", "_works")

    def __init__(
        self, works: list[dist.Work], outputs: Any = (), results: Any = ()
    ) -> None:
        self._works, self._outputs, self._results = works, outputs, results

    def wait(self, limit: timedelta) -> None:
        """Wait for the calls, at most ``limit`` for each; RuntimeError after it."""
        for work in self._works:
            work.wait(limit)
        if self._outputs:
            torch._foreach_copy_(self._outputs, self._results)

    def is_completed(self) -> bool:
        """Return whether the next ``wait`` returns or raises at once."""
        return all(work.is_completed() for work in self._works)


def _call_each(
    start: Callable[..., dist.Work], buffers: Sequence[tuple[object, ...]], options: Any
) -> _Works | dist.Work:
    """Return the work, or works, of ``start(*buffers, options)`` for each buffers."""
    works = [start(*each, options) for each in buffers]
    return works[0] if len(works) == 1 else _Works(works)


def _all_reduce_slices(
    start: Callable[..., dist.Work],
    rank: int,
    shard: Sequence[Tensor],
    full: Sequence[Tensor],
    op: Any,
    overwrite: bool,
) -> _Works:
    """Reduce-scatter over gloo: all-reduces, of which every rank keeps its slice."""
    # torch's reduce-scatter over gloo copies the input, all-reduces the copy, and
    # returns a ``Work`` that ignores the limit of a wait and never completes.
    options = dist.AllreduceOptions()
    options.reduceOp = op
    if not overwrite:
        full = [tensor.clone() for tensor in full]
    # A call per buffer: coalesced buffers would be added in another order.
    works = [start([tensor], options) for tensor in full]
    pairs = zip(full, shard, strict=True)
    return _Works(
        works, shard, [t.narrow(0, rank * len(part), len(part)) for t, part in pairs]
    )


def at_first_rank(
    op: str, full: Tensor | None, shard: Tensor, group: dist.ProcessGroup
) -> None:
    """``"gather"`` shards into the first rank's full buffer, or ``"scatter"`` that."""
    # Bytes, because gloo cannot gather or scatter complex numbers.
    part, parts = shard.view(torch.uint8), None
    if full is not None:
        parts = list(full.view(torch.uint8).chunk(group.size()))
    # torch.distributed expects a global rank.
    send, end = (dist.gather, "dst") if op == "gather" else (dist.scatter, "src")
    first: dict[str, Any] = {end: dist.get_global_rank(group, 0)}
    _send(
        begin(op, group, [shard]),
        lambda later: send(part, parts, group=group, async_op=later, **first),
    )


def all_to_all(
    received: Tensor,
    sent: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> Operation | None:
    """Send a piece of ``sent`` to each rank, and receive a piece from each rank."""
    output, pieces = received.view(torch.uint8), sent.view(torch.uint8)
    theirs, ours = ([n * sent.itemsize for n in each] for each in sizes)
    return _send(
        begin("all_to_all", group, [sent]),
        # Bytes: an exchange computes nothing, and no backend knows all dtypes.
        lambda later: dist.all_to_all_single(
            output, pieces, theirs, ours, group=group, async_op=later
        ),
        async_op=async_op,
    )


def broadcast(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    rank: int = 0,
    async_op: bool = False,
) -> Operation | None:
    """Copy ``tensor`` of a single rank to every rank, in place."""
    first = dist.get_global_rank(group, rank)
    sent = tensor
    # A number alone (0-D) has no view of another size.
    if tensor.dtype not in _AS_IS and tensor.is_contiguous():
        sent = tensor.reshape(-1).view(torch.uint8)
    return _send(
        begin("broadcast", group, [tensor]),
        lambda later: dist.broadcast(sent, src=first, group=group, async_op=later),
        async_op=async_op,
    )


# A first forward may run inside ``torch.func.vjp``, whose tensors gloo cannot read.
@outside_transforms
def broadcast_object(value: object, group: dist.ProcessGroup) -> Any:
    """Return the picklable ``value`` of the first rank on every rank."""
    # Every rank must pass a list of the same length; the contents of the other ranks
    # are overwritten.
    values = [value]
    first = dist.get_global_rank(group, 0)
    _send(
        begin("broadcast_object", group),
        lambda _: dist.broadcast_object_list(values, src=first, group=group),
    )
    return values[0]


TAG = "all_gather_tag"
"""The op of ``all_gather_numbers`` that compares the order of units."""


@outside_transforms
def all_gather_numbers(
    op: str,
    numbers: Sequence[int],
    group: dist.ProcessGroup,
    phase: str,
    dtype: torch.dtype = torch.int64,
) -> list[int]:
    """Return the numbers of all ranks, one rank after the other."""
    # From host memory if the group can send from there: the GPU need not be waited for.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    own = torch.tensor(numbers, dtype=dtype, device=device)
    every = own.new_empty(own.numel() * group.size())
    operation = begin(op, group, [every], phase)
    start = getattr(group, _ALL_GATHER)
    operation.send(start, every, own, AllgatherOptions(), async_op=False)
    found: list[int] = every.tolist()
    return found


@outside_transforms
def all_gather_object(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's picklable ``value``, in group rank order."""
    values: list[Any] = [None] * group.size()
    _send(
        begin("all_gather_object", group),
        lambda _: dist.all_gather_object(values, value, group=group),
    )
    return values


@outside_transforms
def gather_object(value: object, group: dist.ProcessGroup) -> list[Any] | None:
    """Return the picklable values of all ranks on the first, None on the others."""
    # Only the receiver may pass an output list.
    values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    first = dist.get_global_rank(group, 0)
    _send(
        begin("gather_object", group),
        lambda _: dist.gather_object(value, values, dst=first, group=group),
    )
    return values


def _as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """View complex tensors as pairs of real numbers."""
    # The backends have no complex numbers. A sum of complex numbers is the sum of both
    # components, so reductions are correct, too.
    return [torch.view_as_real(tensor) for tensor in tensors]


def _send(
    operation: Operation,
    start: Callable[[bool], dist.Work | None],
    *,
    async_op: bool = False,
) -> Operation | None:
    """Call ``start(async_op)``; wait for the work unless the caller will."""
    # A wait of the host goes through ``Operation.wait``, which can end early.
    later = async_op or bool(operation.patience)
    return operation.send(start, later, async_op=async_op)
