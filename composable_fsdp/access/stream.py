"""Whole tensors of a sharded model, bucket by bucket, as an engine loads them.

The gather of a bucket runs while the caller takes the tensors of the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.hand_over import Entry, beside, entries_of
from composable_fsdp.access.settings import units_with_parts
from composable_fsdp.access.unshard_params import _route, _summoned
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, failed_rank, send_failure
from composable_fsdp.comm.operations import Operation
from composable_fsdp.errors import CollectiveError, DesyncError, PhaseError
from composable_fsdp.flat import memory
from composable_fsdp.flat.residency import shard_versions
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.tree.root import compare_models, meet_over
from composable_fsdp.tree.state import _FSDPState


class _Piece(NamedTuple):
    """Elements of a region, or a tensor that is in no region."""

    entries: Sequence[Entry]
    start: int
    """Its first element in the region."""
    own: Tensor
    numels: list[int]
    """The elements that each rank of the shard group holds."""
    group: dist.ProcessGroup | None
    """The shard group, if parts have to be gathered."""
    rank: int
    ranks: Sequence[int] | None
    """The global ranks for which it is gathered; None for all."""

    def receives(self, rank: int) -> bool:
        """Return whether the global ``rank`` gets what its shard group holds."""
        near = {rank}
        # Parts are needed where tensor parallelism joins them.
        for group in dict.fromkeys(group for e in self.entries for group in e.over):
            near = beside(near, group)
        return self.ranks is None or not near.isdisjoint(self.ranks)

    @property
    def numel(self) -> int:
        """Return the elements of its buffer here."""
        return sum(self.numels) * self.receives(dist.get_rank())


def _piece(
    entries: Sequence[Entry], start: int, stop: int, ranks: Sequence[int] | None
) -> _Piece:
    """Return elements ``[start, stop)`` of the region of ``entries``."""
    ref = entries[0].ref
    if ref is None:
        own = local_of(entries[0].source).reshape(-1)
        return _Piece(entries, start, own, [own.numel()], None, 0, ranks)
    size, rank = ref.region.layout.shard_numel, ref.region.rank
    ends = [size * r for r in range(ref.region.layout.world_size + 1)]
    cuts = [min(max(end, start), stop) for end in ends]
    numels = [stop - start for start, stop in pairwise(cuts)]
    own = ref.region.shard.narrow(0, cuts[rank] % max(size, 1), numels[rank])
    return _Piece(entries, start, own, numels, ref.handle.groups.shard, rank, ranks)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are gathered together, and their bytes of device memory here."""

    names: tuple[str, ...]
    nbytes: int
    sent_nbytes: int
    """Those of copies that go to ``ranks``, until they have arrived."""
    _entries: Sequence[Entry] = field(repr=False)
    _pieces: Sequence[_Piece] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What ``stream_full`` gathers and hands out, in this order."""

    buckets: tuple[Bucket, ...]
    extra_nbytes: int
    """Bytes beside the buckets: an integer by which the ranks agree to go on, or what
    torch needs at most to join the parts of a tensor."""

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of device memory beside the shards: those of two buckets.

        To the byte, if no parts are joined; else an upper bound.
        """
        most, before = self.extra_nbytes, 0
        for each in self.buckets:
            extra = max(each.sent_nbytes, self.extra_nbytes)
            most, before = max(most, before + each.nbytes + extra), each.nbytes
        return most


def stream_full(
    model: nn.Module,
    *,
    max_bytes: int = 1 << 30,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    ranks: Sequence[int] | None = None,
    tensor_parallel: Literal["whole", "local"] = "whole",
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the whole tensors of ``model``, under the names of the plain model.

    They are what ``state_dict()`` holds after the last optimizer step: parameters unit
    by unit, then persistent buffers; a tied one under each name. A tensor is a view of
    its bucket, which lives as long as one of its tensors. Read it on the stream on
    which you iterate; another one waits for that stream first, and takes
    ``tensor.record_stream``. Every rank has to iterate to the end.

    Args:
        model: A module that is or holds fully sharded modules, or a part of a unit.
        max_bytes: Bytes of a bucket's tensors; a larger one is a bucket of its own.
            Device memory holds the shards and two buckets (``stream_plan``), if the
            caller keeps no tensor.
        names: Only these tensors, in the order of the model. Default: all.
        dtype: Cast tensors of floating point to it, before they are sent.
        ranks: Only these global ranks receive, and for them the ranks whose parts
            tensor parallelism joins. Loops of others end without a turn. Default: all.
        tensor_parallel: ``"whole"`` joins DTensors; ``"local"`` gives the parts that
            this rank computes with.

    Collective: per bucket an all-reduce of an integer over each group of the units, and
        an all-gather over each shard group; of a unit above ``max_bytes`` a broadcast
        per tensor and rank with elements; with ``ranks`` an exchange for each; per
        joined tensor an all-gather.
    Raises: PhaseError, inside forward, backward or ``unshard_params``, from these in
        the loop, and after an optimizer step there; DesyncError, if another rank leaves
        before the end; CompositionError, for ``names`` that do not exist.

    >>> for name, tensor in stream_full(model, dtype=torch.bfloat16):
    ...     print(name, tuple(tensor.shape))
    blocks.0.attn.weight (4, 4)
    ...
    """
    states = units_with_parts(model, "stream_full")
    for state in states:
        require_between_steps(state, "stream_full")
        if state.handle.layout.on_meta:
            raise PhaseError(
                f"stream_full: {state.title} is on meta and has no values yet. Load or "
                "initialize the model first."
            )
    how: dict[str, Any] = {
        "max_bytes": max_bytes,
        "names": None if names is None else tuple(names),
        "dtype": dtype,
        "ranks": None if ranks is None else tuple(ranks),
        "tensor_parallel": tensor_parallel,
    }
    stream_plan(model, **how)  # to refuse before any rank waits
    return _stream(model, states, how)


def stream_plan(
    model: nn.Module,
    *,
    max_bytes: int = 1 << 30,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    ranks: Sequence[int] | None = None,
    tensor_parallel: Literal["whole", "local"] = "whole",
) -> StreamPlan:
    """Return the buckets of ``stream_full`` with these arguments, on this rank.

    Raises: CompositionError and ValueError, for arguments that cannot be used.

    >>> plan = stream_plan(model, max_bytes=256 << 20)
    >>> len(plan.buckets), plan.peak_nbytes
    (1, 240)
    """
    every, modes = range(dist.get_world_size()), ("whole", "local")
    for name, given, wanted, is_right in (
        ("dtype", dtype, "a torch.dtype", isinstance(dtype, torch.dtype | None)),
        ("ranks", ranks, f"some of {every}", {*(ranks or ())}.issubset(every)),
        ("tensor_parallel", tensor_parallel, modes, tensor_parallel in modes),
    ):
        if not is_right:
            raise ValueError(f"{name} is {given!r}; expected {wanted}.")
    states = units_with_parts(model, "stream_plan")
    joins = tensor_parallel == "whole"
    buckets: list[list[Entry]] = []
    room = extra = 0
    for unit in entries_of(states, model, names, dtype, joins=joins):
        # A unit that fits stays together: its regions are gathered as they lie. Without
        # padding, which ranks of tensor parallelism may have otherwise.
        fits = sum(entry.nbytes for entry in unit) <= max_bytes
        for part in [unit] if fits else [[entry] for entry in unit]:
            size = sum(entry.nbytes for entry in part)
            if not buckets or size > room:
                buckets.append([])
                room = max_bytes
            buckets[-1] += part
            room -= size
        # To join, torch pads a part, and has the parts of all ranks beside the result.
        sizes = [(e.part_nbytes, [g.size() for g in e.over]) for e in unit if e.over]
        extra = max([extra, *((prod(over) + 1) * part for part, over in sizes)])
    flag = torch.int32.itemsize * bool(_groups(states))
    made = tuple(_bucket(each, ranks) for each in buckets)
    return StreamPlan(made, max(flag, extra))


def _bucket(entries: list[Entry], ranks: Sequence[int] | None) -> Bucket:
    """Return a bucket, with a piece per whole region and per tensor of others."""
    regions: dict[int, list[Entry]] = {}
    for entry in entries:
        key = id(entry if entry.ref is None else entry.ref.region)
        regions.setdefault(key, []).append(entry)
    pieces: list[_Piece] = []
    for each in regions.values():
        layout = None if each[0].ref is None else each[0].ref.region.layout
        if layout is not None and len(each) == len(layout.parameters):
            pieces.append(_piece(each, 0, layout.padded_numel, ranks))
        else:
            ends = [(e, e.offset, e.offset + prod(e.part)) for e in each]
            pieces += [_piece([e], start, stop, ranks) for e, start, stop in ends]
    nbytes = sent = 0
    for piece in pieces:
        itemsize = piece.entries[0].dtype.itemsize
        nbytes += piece.numel * itemsize
        if piece.receives(dist.get_rank()):
            nbytes += sum(e.nbytes - e.part_nbytes for e in piece.entries)
        if ranks is not None and piece.group is not None:
            sent += piece.own.numel() * itemsize
    names = tuple(name for entry in entries for name in entry.names)
    return Bucket(names, nbytes, sent, entries, pieces)


def _send_to_some(
    piece: _Piece, group: dist.ProcessGroup, own: Tensor, full: Tensor
) -> Iterator[tuple[Operation | None, Tensor]]:
    """Send ``own`` to one rank that receives after another."""
    numels = piece.numels
    for target, rank in enumerate(dist.get_process_group_ranks(group)):
        if piece.receives(rank):
            takes, gives = [0] * len(numels), [0] * len(numels)
            gives[target], into = own.numel(), full[:0]
            if target == group.rank():
                takes, into = numels, full
            sizes = takes, gives
            yield collectives.all_to_all(into, own, sizes, group, async_op=True), own


@torch.no_grad()
def _gather(
    bucket: Bucket, buffers: Sequence[Tensor]
) -> Callable[[], dict[str, Tensor]]:
    """Begin to gather; return what waits and gives the tensors that arrive here."""
    # Collectives, and what has to live until they have ended.
    sent: list[tuple[Operation | None, Tensor]] = []
    together: dict[dist.ProcessGroup, list[tuple[Tensor, Tensor]]] = {}
    homes: dict[int, tuple[_Piece, Tensor]] = {}
    for piece, full in zip(bucket._pieces, buffers, strict=True):
        homes |= {id(entry): (piece, full) for entry in piece.entries}
        group, numels = piece.group, piece.numels
        # On the host: from there torch casts in more memory of the device.
        is_there = piece.own.device != full.device
        own = piece.own.to(full.dtype) if is_there else piece.own
        if group is not None and piece.ranks is not None:
            own = own.to(full.device, full.dtype, copy=True)
            sent += _send_to_some(piece, group, own, full)
        elif full.numel():
            parts = torch.split(full, numels)
            # Casts, and copies from the host; the gather is in place.
            parts[piece.rank].copy_(own)
            if group is not None and len(set(numels)) == 1:
                together.setdefault(group, []).append((full, parts[piece.rank]))
            elif group is not None:
                for rank in [rank for rank, numel in enumerate(numels) if numel]:
                    part = parts[rank]
                    work = collectives.broadcast(part, group, rank=rank, async_op=True)
                    sent.append((work, part))
    for group, pairs in together.items():
        wholes, shards = zip(*pairs, strict=True)
        work = collectives.all_gather_flat(wholes, shards, group, async_op=True)
        sent.append((work, wholes[0]))

    @torch.no_grad()
    def finish() -> dict[str, Tensor]:
        for operation, _ in sent:
            assert operation is not None
            operation.wait()
        sent.clear()
        found: dict[str, Tensor] = {}
        # In an order that ranks of other regions share.
        for entry in bucket._entries:
            piece, full = homes[id(entry)]
            if piece.receives(dist.get_rank()):
                at = entry.offset - piece.start
                part = full.narrow(0, at, prod(entry.part)).view(entry.part)
                found |= dict.fromkeys(entry.names, entry.whole(part))
        return found

    # Now, and not when the caller asks: a rank that has left would be missing.
    if any(entry.over for entry in bucket._entries):
        found = finish()
        return lambda: found
    return finish


def _stream(
    model: nn.Module, states: Sequence[_FSDPState], how: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Do as ``stream_full``; on a rank that does not receive, only help the others."""
    groups, device = _groups(states), states[0].handle.layout.device
    is_told = how["ranks"] is None or dist.get_rank() in how["ranks"]
    told = tuple(f"{k}={v}" for k, v in how.items())
    waiting: deque[tuple[tuple[str, ...], Callable[[], dict[str, Tensor]]]] = deque()
    with _summoned(states, rank0_only=False, what="stream_full"):
        call = Call("stream_full", states[0].title, told)
        meet_over(states, call, replicas=True, always=False)
        for state in states:
            compare_models(state, replicas=True)
        versions = [shard_versions(state.handle) for state in states]

        def agree() -> None:
            rank = failed_rank(groups, device)
            if rank is not None:
                raise DesyncError(
                    f"Rank {rank} left stream_full of {states[0].title} before its end "
                    "(a break, an exception, or close()), so it ends on this rank, "
                    f"too. Look at the error of rank {rank}, or take all tensors on "
                    "every rank and choose them by names=[...]."
                )

        def begin() -> None:
            if [shard_versions(state.handle) for state in states] != versions:
                raise PhaseError(
                    f"The parameters of {states[0].title} were written to inside the "
                    "loop over stream_full, so what follows would be newer than what "
                    "came. Step the optimizer behind the loop."
                )
            bucket = left.popleft()
            # Memory before the ranks agree: who raises here is not waited for.
            buffers = [
                memory.new_buffer(each.numel, each.entries[0].dtype, device)
                for each in bucket._pieces
            ]
            agree()
            waiting.append((bucket.names, _gather(bucket, buffers)))

        try:
            left = deque(stream_plan(model, **how).buckets)
            while left or waiting:
                if not waiting:
                    begin()
                names, finish = waiting.popleft()
                found = finish()
                del finish
                for name in names if is_told else ():
                    yield name, found.pop(name)
                    # The loop of the caller has let go of the bucket before.
                    if left and not waiting:
                        begin()
            agree()
        except (DesyncError, CollectiveError):
            raise
        except BaseException:
            for _, finish in waiting:
                finish()  # writes to the buffers, on all ranks
            with suppress(PhaseError):  # the groups are gone
                send_failure(groups, device)
            raise


def _groups(states: Iterable[_FSDPState]) -> list[dist.ProcessGroup]:
    """Return the groups that reach all ranks of the units in turn."""
    return list(dict.fromkeys(group for state in states for group in _route(state)))
