"""Whole tensors of a sharded model, bucket by bucket, as an engine loads them.

::

    bucket 0   gather | hand out tensor by tensor
    bucket 1                  gather              | hand out ...
    bucket 2                                            gather

A bucket is a buffer, of which the tensors are views. The loop of the caller holds the
last tensor of a bucket until it gets the first of the next one, so the gather after
that begins behind the first tensor: there are never more than two buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.tensors import Entry, aligned, entries_of
from composable_fsdp.access.unshard_params import _route, _summoned, units_with_parts
from composable_fsdp.comm import collectives
from composable_fsdp.comm.consensus import failed_rank, send_failure
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import Operation
from composable_fsdp.errors import CollectiveError, DesyncError, PhaseError
from composable_fsdp.flat import memory
from composable_fsdp.flat.param_ref import ParamRef
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.tree.root import compare_models, meet_over
from composable_fsdp.tree.state import _FSDPState


class _Span(NamedTuple):
    """Elements ``[start, stop)`` of the region of ``ref``, for a bucket's buffer."""

    ref: ParamRef
    start: int
    stop: int
    at: int
    """The first byte in the buffer."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are gathered together, with their bytes of device memory here."""

    names: tuple[str, ...]
    nbytes: int
    _buffer: int = field(repr=False)
    _spans: tuple[_Span, ...] = field(repr=False)
    _entries: tuple[tuple[Entry, int], ...] = field(repr=False)
    """The tensors, and their first bytes in the buffer."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What ``stream_full`` gathers and hands out, in its order."""

    buckets: tuple[Bucket, ...]

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of device memory beside the shards: those of two buckets."""
        sizes = [bucket.nbytes for bucket in self.buckets]
        return max(map(sum, pairwise([0, *sizes])), default=0)


def stream_full(
    model: nn.Module,
    *,
    max_bytes: int = 1 << 30,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    ranks: Sequence[int] | None = None,
    prefetch: bool = True,
    tensor_parallel: Literal["whole", "local"] = "whole",
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the whole tensors of ``model``, under the names of the plain model.

    These are the values after the last optimizer step of what ``state_dict()`` holds:
    parameters unit by unit, then persistent buffers. A tied parameter comes under each
    of its names as one tensor. Every tensor is new: a view of its bucket, which lives
    as long as one of its tensors. Every rank has to iterate to the end.

    Args:
        model: A module that is or holds fully sharded modules, or a part of a unit.
        max_bytes: Bytes of a bucket; a larger tensor is a bucket of its own. Beside the
            shards the iteration needs two buckets, ``stream_plan(...).peak_nbytes``, if
            the caller keeps no tensor.
        names: Only these tensors; in the order of the model all the same.
        dtype: Cast tensors of floating point before they are sent.
        ranks: Send to these global ranks only; others hold no bucket, and their loop
            has no turns. Default: all.
        prefetch: Gather the next bucket while this one is handed out.
        tensor_parallel: ``"whole"`` joins what tensor parallelism cuts; ``"local"``
            gives each rank of its mesh the part that it computes with.

    Collective: per bucket an all-reduce of an integer over the groups of the units, and
        an all-gather over each shard group; of units above ``max_bytes`` a broadcast
        from each rank that holds elements of a tensor; with ``ranks`` an exchange.
    Raises: PhaseError, inside forward, backward or ``unshard_params``, and from these
        while the iteration runs; DesyncError on all ranks, if a rank leaves before the
        end; CompositionError, for unknown ``names``.

    >>> for name, tensor in stream_full(model, dtype=torch.bfloat16):
    ...     print(name, tuple(tensor.shape))
    blocks.0.attn.weight (4, 4)
    ...
    """
    states = units_with_parts(model, "stream_full")
    for state in states:
        require_between_steps(state, "stream_full")
    decide: dict[str, Any] = {
        "max_bytes": max_bytes,
        "names": None if names is None else tuple(names),
        "dtype": dtype,
        "ranks": None if ranks is None else tuple(ranks),
        "tensor_parallel": tensor_parallel,
    }
    plan = partial(stream_plan, model, **decide)
    plan()  # raises for arguments that cannot be used
    told = tuple(f"{k}={v}" for k, v in {**decide, "prefetch": prefetch}.items())
    call = Call("stream_full", states[0].title, told)
    return _stream(states, plan, call, ranks, prefetch=prefetch)


def stream_plan(
    model: nn.Module,
    *,
    max_bytes: int = 1 << 30,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    ranks: Sequence[int] | None = None,
    tensor_parallel: Literal["whole", "local"] = "whole",
) -> StreamPlan:
    """Return the buckets of ``stream_full`` with these arguments; sends nothing.

    >>> plan = stream_plan(model, max_bytes=256 << 20)
    >>> len(plan.buckets), plan.peak_nbytes
    (1, 240)
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; expected a positive number.")
    if tensor_parallel not in ("whole", "local"):
        raise ValueError(
            f'tensor_parallel is {tensor_parallel!r}; expected "whole" or "local".'
        )
    joined = tensor_parallel == "whole"
    states = units_with_parts(model, "stream_plan")
    buckets: list[list[Entry]] = [[]]
    room = max_bytes
    for unit in entries_of(states, model, names, dtype, joined=joined):
        # A unit that fits stays together, so that its regions are gathered as they lie.
        fits = sum(each.nbytes for each in unit) <= max_bytes
        for part in [unit] if fits else [[each] for each in unit]:
            size = sum(each.nbytes for each in part)
            if size > room:
                buckets.append([])
                room = max_bytes
            buckets[-1] += part
            room -= size
    return StreamPlan(tuple(_bucket(each, max_bytes) for each in buckets if each))


def _bucket(entries: list[Entry], max_bytes: int) -> Bucket:
    """Lay ``entries`` into a buffer: whole regions if there is room for padding."""
    left = sum(entry.nbytes for entry in entries)
    regions: dict[int, list[Entry]] = {}
    for entry in entries:
        key = id(entry if entry.ref is None else entry.ref.region)
        regions.setdefault(key, []).append(entry)
    at = joined = 0
    spans: list[_Span] = []
    begins: dict[int, int] = {}
    for each in regions.values():
        own = sum(entry.nbytes for entry in each)
        joined += sum(entry.joined_nbytes for entry in each)
        ref, dtype = each[0].ref, each[0].dtype
        if ref is not None:
            layout = ref.region.layout
            padded = aligned(layout.padded_numel * dtype.itemsize)
            is_whole = len(each) == len(layout.parameters)
            if is_whole and at + joined + padded + left - own <= max_bytes:
                spans.append(_Span(ref, 0, layout.padded_numel, at, dtype))
                for entry in each:
                    assert entry.ref is not None
                    offset = entry.ref.slot.offset
                    begins[id(entry)] = at + offset * dtype.itemsize
                at += padded
                left -= own
                continue
        for entry in each:
            begins[id(entry)] = at
            if entry.ref is None:
                numel = local_of(entry.source).numel()
            else:
                slot = entry.ref.slot
                numel = slot.numel
                stop = slot.offset + numel
                spans.append(_Span(entry.ref, slot.offset, stop, at, dtype))
            at += aligned(numel * entry.dtype.itemsize)
        left -= own
    names = tuple(name for entry in entries for name in entry.names)
    return Bucket(
        names,
        at + joined,
        at,
        tuple(span for span in spans if span.start < span.stop),
        tuple((entry, begins[id(entry)]) for entry in entries),
    )


class _Gather:
    """A bucket that is being gathered into a buffer of its own."""

    __slots__ = (
        "_bucket",
        "_buffer",
        "_joined",
        "_kept",
        "_ranks",
        "_sent",
        "receives",
    )

    def __init__(
        self, bucket: Bucket, device: torch.device, ranks: Sequence[int] | None
    ) -> None:
        self._bucket, self._ranks = bucket, ranks
        self.receives = ranks is None or dist.get_rank() in ranks
        nbytes = bucket._buffer if self.receives else 0
        self._buffer = memory.new_buffer(nbytes, torch.uint8, device)
        self._sent: list[Operation | None] = []
        self._kept: list[Tensor] = []
        self._joined: list[tuple[str, Tensor]] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Gather into the buffer; ``values`` waits. Collective: as ``stream_full``."""
        together: dict[dist.ProcessGroup, list[tuple[Tensor, Tensor]]] = {}
        for span in self._bucket._spans:
            region, group = span.ref.region, span.ref.handle.groups.shard
            shard, size = region.rank, region.layout.shard_numel
            ends = range(0, region.layout.padded_numel + 1, size)
            cuts = [min(max(end, span.start), span.stop) for end in ends]
            numels = [stop - start for start, stop in pairwise(cuts)]
            begin = cuts[shard] - shard * size
            own = region.shard[begin : begin + numels[shard]]
            full = self._view(span.at, sum(numels), span.dtype)
            if group is not None and self._ranks is not None:
                self._exchange(full, own, numels, group)
            elif self.receives:
                pieces = torch.split(full, numels)
                # Casts, and copies from the host; the gather is in place.
                pieces[shard].copy_(own)
                if group is None:
                    continue
                if sum(numels) == region.layout.padded_numel:
                    together.setdefault(group, []).append((full, pieces[shard]))
                    continue
                self._sent += [
                    collectives.broadcast(piece, group, rank=rank, async_op=True)
                    for rank, piece in enumerate(pieces)
                    if piece.numel()
                ]
        for group, pairs in together.items():
            fulls, parts = zip(*pairs, strict=True)
            self._sent.append(
                collectives.all_gather_flat(fulls, parts, group, async_op=True)
            )
        for entry, at in self._bucket._entries if self.receives else ():
            if entry.ref is None:
                source = local_of(entry.source)
                self._view(at, source.numel(), entry.dtype).copy_(source.reshape(-1))
        # Now, and not when the caller asks: a rank that leaves would be missing.
        if any(entry.is_cut for entry, _ in self._bucket._entries):
            self._joined = self.finish()

    def _exchange(
        self, full: Tensor, own: Tensor, numels: list[int], group: dist.ProcessGroup
    ) -> None:
        """Send ``own``, the piece of this rank, to those ranks that receive."""
        assert self._ranks is not None
        sent = own.to(full)
        self._kept.append(sent)
        none = [0] * len(numels)
        for target, rank in enumerate(dist.get_process_group_ranks(group)):
            if rank in self._ranks:
                here = target == group.rank()
                ours = [*none]
                ours[target] = own.numel()
                sizes = numels if here else none, ours
                into = full if here else full[:0]
                self._sent.append(
                    collectives.all_to_all(into, sent, sizes, group, async_op=True)
                )

    def _view(self, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return elements of the buffer, or nothing if this rank does not receive."""
        nbytes = numel * dtype.itemsize if self.receives else 0
        return self._buffer[at : at + nbytes].view(dtype)

    @torch.no_grad()
    def finish(self) -> list[tuple[str, Tensor]]:
        """Wait, and return the tensors, the last one first.

        Collective: of entries that tensor parallelism cuts, an all-gather each.
        """
        if self._joined is not None:
            return self._joined
        for operation in filter(None, self._sent):
            operation.wait()
        self._sent, self._kept = [], []
        found: list[tuple[str, Tensor]] = []
        for entry, at in self._bucket._entries if self.receives else ():
            ref, source = entry.ref, entry.source
            if ref is not None:
                value = self._view(at, ref.slot.numel, entry.dtype).view(ref.slot.shape)
                if entry.is_cut:
                    value = ref.form.whole(value)
            elif entry.is_cut:
                dtensor: Any = source.detach().to(entry.dtype)
                value = dtensor.full_tensor()
            else:
                value = self._view(at, prod(entry.shape), entry.dtype).view(entry.shape)
            found += [(name, value) for name in entry.names]
        return found[::-1]


def _stream(
    states: Sequence[_FSDPState],
    plan: Callable[[], StreamPlan],
    call: Call,
    ranks: Sequence[int] | None,
    *,
    prefetch: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Do as ``stream_full``."""
    device = states[0].handle.layout.device
    with _summoned(states, rank0_only=False, what="stream_full"):
        meet_over(states, call, replicas=True, always=False)
        for state in states:
            compare_models(state, replicas=True)
        left = deque(plan().buckets)
        waiting: deque[_Gather] = deque()

        def begin() -> None:
            # Memory before the ranks agree: who raises here is not waited for.
            gather = _Gather(left.popleft(), device, ranks)
            _agree(states, device)
            gather.start()
            waiting.append(gather)

        try:
            while left or waiting:
                if not waiting:
                    begin()
                values = waiting.popleft().finish()
                while values:
                    yield values.pop()
                    # The loop of the caller has let go of the bucket before.
                    if prefetch and left and not waiting:
                        begin()
            _agree(states, device)
        except (DesyncError, CollectiveError):
            raise
        except BaseException:
            for each in waiting:
                each.finish()  # writes to the buffer, on all ranks
            with suppress(PhaseError):  # the groups are gone
                send_failure(_groups(states), device)
            raise


def _groups(states: Iterable[_FSDPState]) -> list[dist.ProcessGroup]:
    """Return the groups that reach all ranks of the units in turn."""
    return list(dict.fromkeys(group for state in states for group in _route(state)))


def _agree(states: Sequence[_FSDPState], device: torch.device) -> None:
    """Raise DesyncError, on all ranks, if a rank has left the iteration."""
    rank = failed_rank(_groups(states), device)
    if rank is not None:
        raise DesyncError(
            f"Rank {rank} left stream_full of {states[0].title} before its end (a "
            "break, an exception, or close()), so it ends on this rank, too. Look at "
            f"the error of rank {rank}, or take all tensors on every rank and choose "
            "them by names=[...]."
        )
