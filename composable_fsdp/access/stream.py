"""Whole tensors of a sharded model, bucket by bucket, as an engine loads them.

::

    bucket 0   gather | hand out tensor by tensor
    bucket 1                  gather              | hand out ...
    bucket 2                                            gather

A bucket is a buffer per region, of which the tensors are views. The caller's loop holds
the last tensor of a bucket until it gets the first one of the next, so the gather after
that begins behind this first tensor: there are never more than two buckets.
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

from composable_fsdp.access.tensors import Entry, entries_of
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
from composable_fsdp.runtime.unshard import shard_versions
from composable_fsdp.tree.root import compare_models, meet_over
from composable_fsdp.tree.state import _FSDPState


class _Piece(NamedTuple):
    """Elements ``[start, stop)`` of a region, or a tensor that is in no region."""

    entries: tuple[Entry, ...]
    start: int
    stop: int
    ranks: Sequence[int] | None
    """The global ranks for which it is gathered; None for all."""

    def receives(self, rank: int) -> bool:
        """Return whether the global ``rank`` gets what its shard group holds."""
        if self.ranks is None:
            return True
        # Parts are needed where tensor parallelism joins them. Ranks of a mesh have
        # strides: what is near this rank is near each rank of the shard group.
        here, near = dist.get_rank(), {0}
        for group in dict.fromkeys(group for e in self.entries for group in e.over):
            steps = [each - here for each in dist.get_process_group_ranks(group)]
            near = {a + b for a in near for b in steps}
        return any(rank + step in self.ranks for step in near)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its buffer, and of what its parts are joined to."""
        joined = sum(entry.joined_nbytes for entry in self.entries)
        return (self.stop - self.start) * self.entries[0].dtype.itemsize + joined

    def own(self, ref: ParamRef) -> tuple[Tensor, list[int]]:
        """Return what this rank holds, and the elements on each rank that shards."""
        size, rank = ref.region.layout.shard_numel, ref.region.rank
        ends = [size * r for r in range(ref.region.layout.world_size + 1)]
        cuts = [min(max(end, self.start), self.stop) for end in ends]
        numels = [stop - start for start, stop in pairwise(cuts)]
        return ref.region.shard.narrow(
            0, cuts[rank] % max(size, 1), numels[rank]
        ), numels


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are gathered together, and their bytes of device memory here."""

    names: tuple[str, ...]
    nbytes: int
    _pieces: tuple[_Piece, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What ``stream_full`` gathers and hands out, in this order."""

    buckets: tuple[Bucket, ...]
    extra_nbytes: int
    """Bytes beside the buckets: an integer by which the ranks agree to go on, and what
    torch needs at most to join the parts of a tensor."""

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of device memory beside the shards: those of two buckets."""
        sizes = [bucket.nbytes for bucket in self.buckets]
        return max(map(sum, pairwise([0, *sizes])), default=0) + self.extra_nbytes


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

    They have the values after the last optimizer step, and are what ``state_dict()``
    holds: parameters unit by unit, then persistent buffers. A tied parameter comes as
    one tensor under each name. A tensor is a view of its bucket, which lives as long as
    one of its tensors. Every rank has to iterate to the end.

    Args:
        model: A module that is or holds fully sharded modules, or a part of a unit.
        max_bytes: Bytes of a bucket; a larger tensor is a bucket of its own. Device
            memory holds the shards and two buckets (``stream_plan``), if the caller
            keeps no tensor.
        names: Only these tensors, in the order of the model. Default: all.
        dtype: Cast tensors of floating point to it, before they are sent.
        ranks: Only these global ranks receive, and for them the ranks whose parts
            tensor parallelism joins. Loops of others end without a turn. Default: all.
        prefetch: Gather the next bucket while this one is handed out.
        tensor_parallel: ``"whole"`` joins DTensors; ``"local"`` gives the parts that
            this rank computes with. Experts that are no DTensors (``expert_mesh``) come
            whole, on the ranks that have them.

    Collective: per bucket an all-reduce of an integer over each group of the units, and
        an all-gather over each shard group; of a unit above ``max_bytes`` a broadcast
        per tensor and rank with elements; with ``ranks`` an exchange; per joined tensor
        an all-gather.
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
    decide: dict[str, Any] = {
        "max_bytes": max_bytes,
        "names": None if names is None else tuple(names),
        "dtype": dtype,
        "ranks": None if ranks is None else tuple(ranks),
        "tensor_parallel": tensor_parallel,
    }
    _require_usable(max_bytes, tensor_parallel, decide["ranks"])
    told = tuple(f"{k}={v}" for k, v in {**decide, "prefetch": prefetch}.items())
    call = Call("stream_full", states[0].title, told)
    plan = partial(stream_plan, model, **decide)
    return _stream(states, plan, call, decide["ranks"], prefetch=prefetch)


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
    _require_usable(max_bytes, tensor_parallel, ranks)
    states = units_with_parts(model, "stream_plan")
    joined = tensor_parallel == "whole"
    units = entries_of(states, model, names, dtype, joined=joined)
    # Last, because ranks with other experts may need another number of buckets.
    units.sort(key=_is_expert)
    buckets: list[list[Entry]] = []
    room = joining = 0
    for unit in units:
        for entry in unit:
            # torch pads a part, and has the parts of all ranks beside the result.
            parts = prod(group.size() for group in entry.over)
            joining = max(joining, (parts + 1) * entry.part_nbytes * bool(entry.over))
        # A unit that fits stays together: its regions are gathered as they lie.
        fits = sum(each.nbytes for each in unit) <= max_bytes
        for part in [unit] if fits else [[each] for each in unit]:
            size = sum(each.nbytes for each in part)
            if (
                not buckets
                or size > room
                or _is_expert(unit) != _is_expert(buckets[-1])
            ):
                buckets.append([])
                room = max_bytes
            buckets[-1] += part
            room -= size
    flag = torch.int32.itemsize if _groups(states) else 0
    made = tuple(_bucket(each, max_bytes, ranks) for each in buckets)
    return StreamPlan(made, flag + joining)


def _is_expert(unit: list[Entry]) -> bool:
    """Return whether other ranks have other experts in the place of ``unit``."""
    refs = [entry.ref for entry in unit if entry.ref is not None]
    return any(ref.handle.groups.experts_ref is not None for ref in refs)


def _require_usable(max_bytes: int, how: str, ranks: Sequence[int] | None) -> None:
    """Raise ValueError, naming the argument that cannot be used."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; expected a positive number.")
    if how not in ("whole", "local"):
        raise ValueError(f'tensor_parallel is {how!r}; expected "whole" or "local".')
    size = dist.get_world_size()
    if ranks is not None and not set(ranks) <= set(range(size)):
        raise ValueError(f"ranks is {ranks}; expected global ranks below {size}.")


def _bucket(
    entries: list[Entry], max_bytes: int, ranks: Sequence[int] | None
) -> Bucket:
    """Cut ``entries`` into pieces: whole regions, if there is room for padding."""
    regions: dict[int, list[Entry]] = {}
    for entry in entries:
        key = id(entry if entry.ref is None else entry.ref.region)
        regions.setdefault(key, []).append(entry)
    pieces: list[_Piece] = []
    room = max_bytes - sum(entry.nbytes for entry in entries)
    for each in regions.values():
        if (ref := each[0].ref) is not None:
            layout = ref.region.layout
            whole = _Piece(tuple(each), 0, layout.padded_numel, ranks)
            more = whole.nbytes - sum(entry.nbytes for entry in each)
            if len(each) == len(layout.parameters) and more <= room:
                pieces.append(whole)
                room -= more
                continue
        pieces += [_Piece((e,), e.offset, e.offset + prod(e.part), ranks) for e in each]
    nbytes = sum(p.nbytes for p in pieces if p.receives(dist.get_rank()))
    if ranks is not None:
        nbytes += sum(map(_sent_nbytes, pieces))
    names = tuple(name for entry in entries for name in entry.names)
    return Bucket(names, nbytes, tuple(pieces))


def _sent_nbytes(piece: _Piece) -> int:
    """Return the bytes of this rank's part, if it is cast, or copied from the host."""
    ref, dtype = piece.entries[0].ref, piece.entries[0].dtype
    if ref is None or ref.handle.groups.shard is None:
        return 0
    if ref.region.layout.dtype == dtype and not ref.handle.layout.offload:
        return 0
    return piece.own(ref)[0].numel() * dtype.itemsize


class _Gather:
    """A bucket that is being gathered, into a buffer per piece."""

    __slots__ = ("_bucket", "_buffers", "_found", "_sent")

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self._bucket = bucket
        here = dist.get_rank()
        self._buffers = [
            memory.new_buffer(
                (piece.stop - piece.start) * piece.receives(here),
                piece.entries[0].dtype,
                device,
            )
            for piece in bucket._pieces
        ]
        self._sent: list[tuple[Operation | None, Tensor]] = []
        """Collectives, and what has to live until they have ended."""
        self._found: dict[str, Tensor] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Gather into the buffers; ``finish`` waits. Collective: as ``stream_full``."""
        together: dict[dist.ProcessGroup, list[tuple[Tensor, Tensor]]] = {}
        for piece, full in zip(self._bucket._pieces, self._buffers, strict=True):
            ref = piece.entries[0].ref
            if ref is None:
                if full.numel():
                    full.copy_(local_of(piece.entries[0].source).reshape(-1))
                continue
            group, (own, numels) = ref.handle.groups.shard, piece.own(ref)
            if group is not None and piece.ranks is not None:
                self._exchange(piece, full, group)
            elif full.numel():
                parts = torch.split(full, numels)
                # Casts, and copies from the host; the gather is in place.
                parts[ref.region.rank].copy_(own)
                if group is not None and len(set(numels)) == 1:
                    pair = full, parts[ref.region.rank]
                    together.setdefault(group, []).append(pair)
                elif group is not None:
                    for rank, part in enumerate(parts):
                        if part.numel():
                            sent = collectives.broadcast(
                                part, group, rank=rank, async_op=True
                            )
                            self._sent.append((sent, part))
        for group, pairs in together.items():
            wholes, shards = zip(*pairs, strict=True)
            work = collectives.all_gather_flat(wholes, shards, group, async_op=True)
            self._sent.append((work, wholes[0]))
        # Now, and not when the caller asks: a rank that has left would be missing.
        if any(entry.over for piece in self._bucket._pieces for entry in piece.entries):
            self.finish()

    def _exchange(self, piece: _Piece, full: Tensor, group: dist.ProcessGroup) -> None:
        """Send this rank's part to the ranks of ``group`` that receive."""
        ref = piece.entries[0].ref
        assert ref is not None
        own, numels = piece.own(ref)
        sent, none = own.to(full), [0] * len(numels)
        for target, rank in enumerate(dist.get_process_group_ranks(group)):
            if piece.receives(rank):
                is_here, ours = target == group.rank(), [*none]
                ours[target] = own.numel()
                sizes = numels if is_here else none, ours
                into = full if is_here else full[:0]
                work = collectives.all_to_all(into, sent, sizes, group, async_op=True)
                self._sent.append((work, sent))

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """Wait, and return the tensors; nothing where none arrive.

        Collective: of entries that tensor parallelism cuts, an all-gather each.
        """
        if self._found is None:
            for operation, _ in self._sent:
                assert operation is not None
                operation.wait()
            self._sent, self._found = [], {}
            for piece, full in zip(self._bucket._pieces, self._buffers, strict=True):
                if full.numel() < piece.stop - piece.start:
                    continue
                for entry in piece.entries:
                    at = entry.offset - piece.start
                    part = full.narrow(0, at, prod(entry.part)).view(entry.part)
                    self._found |= dict.fromkeys(entry.names, entry.whole(part))
            self._buffers = []
        return self._found


def _stream(
    states: Sequence[_FSDPState],
    plan: Callable[[], StreamPlan],
    call: Call,
    ranks: Sequence[int] | None,
    *,
    prefetch: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Do as ``stream_full``."""
    device, title = states[0].handle.layout.device, states[0].title
    with _summoned(states, rank0_only=False, what="stream_full"):
        meet_over(states, call, replicas=True, always=False)
        for state in states:
            compare_models(state, replicas=True)
        versions = [shard_versions(state.handle) for state in states]
        left = deque(plan().buckets)
        waiting: deque[tuple[Bucket, _Gather]] = deque()

        def begin() -> None:
            if [shard_versions(state.handle) for state in states] != versions:
                raise PhaseError(
                    f"The parameters of {title} were written to inside the loop over "
                    "stream_full, so what follows would be newer than what came. Step "
                    "the optimizer behind the loop."
                )
            bucket = left.popleft()
            # Memory before the ranks agree: who raises here is not waited for.
            gather = _Gather(bucket, device)
            _agree(states, device)
            gather.start()
            waiting.append((bucket, gather))

        idle = _most_buckets(states, device, len(left)) - len(left)
        try:
            while left or waiting:
                if not waiting:
                    begin()
                bucket, gather = waiting.popleft()
                found = gather.finish()
                del gather
                for name in (
                    bucket.names if ranks is None or dist.get_rank() in ranks else ()
                ):
                    yield name, found.pop(name)
                    # The loop of the caller has let go of the bucket before.
                    if prefetch and left and not waiting:
                        begin()
            for _ in range(idle + 1):
                _agree(states, device)
        except (DesyncError, CollectiveError):
            raise
        except BaseException:
            for _, gather in waiting:
                gather.finish()  # writes to the buffers, on all ranks
            with suppress(PhaseError):  # the groups are gone
                send_failure(_groups(states), device)
            raise


def _groups(states: Iterable[_FSDPState]) -> list[dist.ProcessGroup]:
    """Return the groups that reach all ranks of the units in turn."""
    return list(dict.fromkeys(group for state in states for group in _route(state)))


def _most_buckets(states: Sequence[_FSDPState], device: torch.device, own: int) -> int:
    """Return the largest number of buckets of a rank; ranks may have other experts."""
    if all(state.handle.groups.experts_ref is None for state in states):
        return own
    count = torch.tensor([own], dtype=torch.int32, device=device)
    for group in _groups(states):
        collectives.all_reduce(count, group, maximum=True)
    return int(count.item())


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
