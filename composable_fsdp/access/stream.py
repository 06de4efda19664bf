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
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.tensors import Entry, chosen, entries_of
from composable_fsdp.access.unshard_params import _route, _summoned, units_with_parts
from composable_fsdp.comm import collectives
from composable_fsdp.comm.consensus import failed_rank, send_failure
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import Operation
from composable_fsdp.errors import CollectiveError, DesyncError, PhaseError
from composable_fsdp.flat import memory
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

    @property
    def nbytes(self) -> int:
        """Return the bytes of its buffer, and of what its parts are joined to."""
        size = self.entries[0].dtype.itemsize
        joined = sum(entry.joined_nbytes for entry in self.entries)
        return (self.stop - self.start) * size + joined

    def own(self) -> tuple[Tensor, list[int]]:
        """Return what this rank holds, and the elements on each rank that shards."""
        ref = self.entries[0].ref
        assert ref is not None
        size, rank = ref.region.layout.shard_numel, ref.region.rank
        ends = [size * r for r in range(ref.region.layout.world_size + 1)]
        cuts = [min(max(end, self.start), self.stop) for end in ends]
        numels = [stop - start for start, stop in pairwise(cuts)]
        first = cuts[rank] - ends[rank]
        return ref.region.shard[first : first + numels[rank]], numels


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are gathered together, and their bytes of device memory here."""

    names: tuple[str, ...]
    nbytes: int
    _receives: bool = field(repr=False)
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

    These are the values after the last optimizer step, of what ``state_dict()`` holds:
    parameters unit by unit, then persistent buffers. A tied parameter comes as one
    tensor under each of its names. A tensor is a view of its bucket, which lives as
    long as one of its tensors. Every rank has to iterate to the end.

    Args:
        model: A module that is or holds fully sharded modules, or a part of a unit.
        max_bytes: Bytes of a bucket; a larger tensor is a bucket of its own. Beside the
            shards, two buckets are in device memory (``stream_plan``), if the caller
            keeps no tensor.
        names: Only these tensors, in the order of the model. Default: all.
        dtype: Cast tensors of floating point to it, before they are sent.
        ranks: Only these global ranks receive, and with them the ranks whose parts
            tensor parallelism joins; the loop of the others ends without a turn.
        prefetch: Gather the next bucket while this one is handed out.
        tensor_parallel: ``"whole"`` joins what tensor parallelism cuts, and brings the
            experts of all ranks; ``"local"``: what this rank computes with.

    Collective: per bucket an all-reduce of an integer over each group of the units, and
        an all-gather over each shard group; of a unit above ``max_bytes`` a broadcast
        per tensor and rank that holds elements; with ``ranks`` an exchange instead.
        Joined parts: an all-gather each; experts: a broadcast each.
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

    Collective: of experts (``expert_mesh``), an all-gather of their names and shapes.
    Raises: CompositionError, as ``stream_full``; ValueError.

    >>> plan = stream_plan(model, max_bytes=256 << 20)
    >>> len(plan.buckets), plan.peak_nbytes
    (1, 240)
    """
    _require_usable(max_bytes, tensor_parallel, ranks)
    states = units_with_parts(model, "stream_plan")
    units = entries_of(states, model, dtype, joined=tensor_parallel == "whole")
    buckets: list[list[Entry]] = [[]]
    room, extra = max_bytes, torch.int32.itemsize if _groups(states) else 0
    joining = 0
    for unit in chosen(units, names, model):
        joining = max(joining, *(each.joining_nbytes for each in unit))
        # A unit that fits stays together: its regions are gathered as they lie.
        fits = sum(each.nbytes for each in unit) <= max_bytes
        for part in [unit] if fits else [[each] for each in unit]:
            size = sum(each.nbytes for each in part)
            if size > room:
                buckets.append([])
                room = max_bytes
            buckets[-1] += part
            room -= size
    made = [_bucket(each, max_bytes, ranks) for each in buckets if each]
    return StreamPlan(tuple(made), extra + joining)


def _require_usable(max_bytes: int, how: str, ranks: Sequence[int] | None) -> None:
    """Raise ValueError, naming the argument that cannot be used."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; expected a positive number.")
    if how not in ("whole", "local"):
        raise ValueError(f'tensor_parallel is {how!r}; expected "whole" or "local".')
    world = dist.get_world_size()
    if ranks is not None and not set(ranks) <= set(range(world)):
        raise ValueError(
            f"ranks is {tuple(ranks)}; expected global ranks below {world}."
        )


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
            whole = _Piece(tuple(each), 0, layout.padded_numel)
            more = whole.nbytes - sum(entry.nbytes for entry in each)
            if len(each) == len(layout.parameters) and more <= room:
                pieces.append(whole)
                room -= more
                continue
        pieces += [_Piece((e,), e.offset, e.offset + e.numel) for e in each]
    receives = _receives(entries, ranks, dist.get_rank())
    nbytes = sum(piece.nbytes for piece in pieces) if receives else 0
    if ranks is not None:
        nbytes += sum(_sent_nbytes(piece) for piece in pieces)
    names = tuple(name for entry in entries for name in entry.names)
    return Bucket(names, nbytes, receives, tuple(pieces))


def _sent_nbytes(piece: _Piece) -> int:
    """Return the bytes of this rank's part, if it is cast, or copied from the host."""
    entry = piece.entries[0]
    ref, dtype = entry.ref, entry.dtype
    if ref is None or ref.handle.groups.shard is None:
        return 0
    is_as_it_is = ref.region.layout.dtype == dtype and not ref.handle.layout.offload
    return 0 if is_as_it_is else piece.own()[0].numel() * dtype.itemsize


def _receives(entries: Iterable[Entry], ranks: Sequence[int] | None, rank: int) -> bool:
    """Return whether the global ``rank`` receives what its shard group has."""
    if ranks is None:
        return True
    # Its parts are needed where tensor parallelism joins them. Ranks of a mesh have
    # strides, so what is near this rank is near each rank.
    near = {0}
    for group in dict.fromkeys(g for entry in entries for g in entry.joined_over):
        steps = [r - dist.get_rank() for r in dist.get_process_group_ranks(group)]
        near = {a + b for a in near for b in steps}
    return any(rank + step in ranks for step in near)


class _Gather:
    """A bucket that is being gathered, into a buffer per piece."""

    __slots__ = ("_bucket", "_buffers", "_joined", "_kept", "_ranks", "_sent")

    def __init__(
        self, bucket: Bucket, device: torch.device, ranks: Sequence[int] | None
    ) -> None:
        self._bucket, self._ranks = bucket, ranks
        self._buffers = [
            memory.new_buffer(
                piece.stop - piece.start if bucket._receives else 0,
                piece.entries[0].dtype,
                device,
            )
            for piece in bucket._pieces
        ]
        self._sent: list[Operation | None] = []
        self._kept: list[Tensor] = []
        self._joined: list[tuple[str, Tensor]] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Gather into the buffers; ``finish`` waits. Collective: as ``stream_full``."""
        together: dict[dist.ProcessGroup, list[tuple[Tensor, Tensor]]] = {}
        for piece, full in zip(self._bucket._pieces, self._buffers, strict=True):
            ref = piece.entries[0].ref
            if piece.start == piece.stop:
                continue
            if ref is None:
                if full.numel():
                    full.copy_(local_of(piece.entries[0].source).reshape(-1))
                continue
            group = ref.handle.groups.shard
            own, numels = piece.own()
            if group is not None and self._ranks is not None:
                self._exchange(full, own, numels, group)
                continue
            parts = torch.split(full, numels) if full.numel() else ()
            if not parts:
                continue
            # Casts, and copies from the host; the gather is in place.
            parts[ref.region.rank].copy_(own)
            if group is None:
                continue
            if len(set(numels)) == 1:
                pair = full, parts[ref.region.rank]
                together.setdefault(group, []).append(pair)
                continue
            self._sent += [
                collectives.broadcast(part, group, rank=rank, async_op=True)
                for rank, part in enumerate(parts)
                if part.numel()
            ]
        for group, pairs in together.items():
            whole, parts = zip(*pairs, strict=True)
            self._sent.append(
                collectives.all_gather_flat(whole, parts, group, async_op=True)
            )
        # Now, and not when the caller asks: a rank that has left would be missing.
        if any(e.joined_over for piece in self._bucket._pieces for e in piece.entries):
            self._joined = self.finish()

    def _exchange(
        self, full: Tensor, own: Tensor, numels: list[int], group: dist.ProcessGroup
    ) -> None:
        """Send ``own``, this rank's part, to the ranks of ``group`` that receive."""
        entries = [e for piece in self._bucket._pieces for e in piece.entries]
        sent, none = own.to(full), [0] * len(numels)
        self._kept.append(sent)
        for target, rank in enumerate(dist.get_process_group_ranks(group)):
            if _receives(entries, self._ranks, rank):
                here = target == group.rank()
                ours = [
                    own.numel() if each == target else 0 for each in range(len(none))
                ]
                sizes = numels if here else none, ours
                into = full if here else full[:0]
                self._sent.append(
                    collectives.all_to_all(into, sent, sizes, group, async_op=True)
                )

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
        found: dict[str, Tensor] = {}
        for piece, full in zip(self._bucket._pieces, self._buffers, strict=True):
            for entry in piece.entries if self._bucket._receives else ():
                at = entry.offset - piece.start
                part = full[at : at + entry.numel].view(entry.part_shape)
                found |= dict.fromkeys(entry.names, entry.whole(part))
        self._buffers = []
        if self._ranks is not None and dist.get_rank() not in self._ranks:
            return []
        return [(name, found[name]) for name in reversed(self._bucket.names)]


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
        versions = [shard_versions(state.handle) for state in states]
        left = deque(plan().buckets)
        waiting: deque[_Gather] = deque()

        def begin() -> None:
            if [shard_versions(state.handle) for state in states] != versions:
                raise PhaseError(
                    f"The parameters of {states[0].title} were written to inside the "
                    "loop over stream_full, so what follows would be newer than what "
                    "came. Step the optimizer behind the loop."
                )
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
