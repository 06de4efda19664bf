"""Makes a save or load end alike on all ranks: an error of a rank is raised everywhere.

The ranks of the model's mesh exchange objects over a private gloo group, so checkpoint
exchanges never mix with the collectives of training. Values that several ranks of a
load hold are read once: each rank reads a part, and sends it to the others::

    elements of both replicas    | a   b   c | d          e |
    replica 0 reads, verifies    | a   b   c |              |
    replica 1 reads, verifies    |           | d          e |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.consensus import Failure, Outcome, first_failure
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.comm.nodes import group_timeout, private_group
from composable_fsdp.errors import (
    CheckpointError,
    CollectiveError,
    DesyncError,
    FSDPError,
)
from composable_fsdp.storage.contents import units_in
from composable_fsdp.storage.source import Copy
from composable_fsdp.storage.tensors import mesh_groups_in, ranks_of
from composable_fsdp.storage.writer import aligned, is_plain


class SaveFuture(Future[None]):
    """The outcome of an asynchronous save; ``is_seen``: a caller has asked."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.is_seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises: the error of the save, or TimeoutError."""
        self.is_seen = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the error of the save, or None."""
        self.is_seen = True
        return super().exception(timeout)


pending: dict[tuple[int, ...], SaveFuture] = {}
"""The last asynchronous save, by the global ranks of the team."""


def wait_for_pending(team: Team) -> str | None:
    """Wait for the last asynchronous save; return an error, "" for one that is seen."""
    # Not ``pop``: the call may raise another error first, and a later one this failure.
    future = pending.get(team.ranks)
    seen = future is not None and future.is_seen
    # Waits; ``is_seen`` does not change.
    error = None if future is None else Future.exception(future)
    if future is None or error is None:
        return None
    # Some errors come after the commit, and say so.
    text = error.args[0] if error.args else error
    told = f"The asynchronous save of {future.path} ended with an error. {text}"
    return "" if seen else told


def raise_unseen(team: Team, answers: list[str | None]) -> None:
    """Raise the failure of the previous save once, if no rank has seen it."""
    pending.pop(team.ranks, None)
    # All ranks have the same ``answers``, so all ranks decide alike.
    failures = [each for each in answers if each is not None]
    if failures and all(failures):
        raise CheckpointError(f"{failures[0]} This call did nothing; repeat it.")


class FirstError:
    """Keeps the first error of its blocks, which this rank tells the others later."""

    error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        # Raised here, the other ranks would wait in the exchange for this rank.
        if isinstance(error, Exception):
            self.error = self.error or error
        return isinstance(error, Exception)


class Team:
    """The ranks of a save or load; ``group`` is None if there is a single rank."""

    __slots__ = ("group", "rank", "ranks", "world_size")

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: tuple[int, ...] = (0,)
    ) -> None:
        self.group, self.ranks = group, ranks
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()

    def group_of(self, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """Return a gloo group of several of the ranks, with the time-out of the team's.

        Collective: creates the group at the first call; other ranks need not call.
        """
        assert self.group is not None
        found = private_group(ranks, purpose, group_timeout(self.group))
        assert found is not None
        return found

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Return every rank's ``value`` in rank order, if no rank has an ``error``.

        Collective: one all-gather of objects over the group.
        """
        everyone = self.outcomes(error, value)
        self.raise_first([each.failure for each in everyone], error)
        return [each.value for each in everyone]

    def outcomes(
        self, error: Exception | None, value: Any = None, *, first: bool = False
    ) -> list[Outcome]:
        """Return every rank's error and ``value``, in rank order.

        With ``first`` on rank 0 alone, and an empty list elsewhere.

        Collective: one all-gather (``first``: gather) of objects over the group.
        """
        said = Outcome(self.failure_of(error), value)
        if self.group is None:
            return [said]
        send = collectives.gather_object if first else collectives.all_gather_object
        with _exchange(error):
            return send(said, self.group) or []

    def failure_of(self, error: Exception | None) -> Failure | None:
        """Return the failure of this rank, as other ranks receive the failure."""
        if isinstance(error, MemoryError):
            error = CheckpointError(
                "this process has no more memory for the checkpoint. Nothing was "
                "changed; free memory, or use more ranks."
            )
        elif isinstance(error, OSError):
            # The reason and the file, without the error number that ``str`` adds.
            told = f"{error.strerror or error}"
            name = f" ({error.filename})" if error.filename else ""
            error = CheckpointError(
                f"the checkpoint could not be accessed: {told}{name}."
            )
        return Failure.of(error, self.ranks[self.rank])

    def from_first(
        self, failures: Sequence[Failure | None], own: Exception | None
    ) -> None:
        """Send ``failures`` from rank 0 to all ranks; raise the first on each rank.

        Collective: one broadcast of objects over the group.
        """
        if self.group is not None:
            with _exchange(own):
                failures = collectives.broadcast_object(list(failures), self.group)
        self.raise_first(failures, own)

    def raise_first(
        self, failures: Sequence[Failure | None], own: Exception | None
    ) -> None:
        """Raise the first failure, if any; on its rank, ``own`` becomes the cause."""
        failure = first_failure(failures)
        if failure is not None:
            # On the failing rank, too: the error has the same text on all ranks.
            is_own = failure.rank == self.ranks[self.rank]
            named = self.world_size > 1
            raise failure.rebuilt(named=named) from (own if is_own else None)


@contextmanager
def _exchange(own: Exception | None) -> Iterator[None]:
    """Raise ``own``, or CheckpointError, if a collective of the block breaks."""
    try:
        yield
    # torch raises ValueError for a group that was destroyed.
    except (RuntimeError, ValueError) as error:
        broke = isinstance(error, CollectiveError)
        if isinstance(error, FSDPError) and not broke:
            raise
        what = "Another rank was lost, or the process group destroyed, while"
        way_out = "Start the ranks again and load the last good checkpoint."
        if not dist.is_initialized():
            what = (
                "The process group was destroyed "
                "(torch.distributed.destroy_process_group) before"
            )
            way_out = (
                "Call result() of what async_save returned, on every rank, before "
                "destroy_process_group."
            )
        raise own or CheckpointError(
            f"{what} the ranks agreed on a checkpoint ({error}). Nothing was committed "
            f"unless the path is there now; verify(path) tells. {way_out}"
        ) from error


def _meshes(module: object) -> tuple[list[Any], list[dist.ProcessGroup], bool]:
    """Return the meshes of units, the groups of DTensors, and whether all ranks do."""
    if not isinstance(module, nn.Module):
        return [], [], True
    states = units_in(module)
    layouts = list({id(state.ranks): state.ranks for state in states}.values())
    others = mesh_groups_in(module, states)
    # Without an exchange: usually data and tensor parallelism take all ranks.
    is_world = not layouts
    for layout in layouts:
        count, found = layout.world_size, set(ranks_of(layout.shard))
        if layout.replicate is not None:
            found.update(ranks_of(layout.replicate))
        for group in others:
            ranks = ranks_of(group)
            # A dim inside of the ranks of the data adds no rank.
            if found.isdisjoint(set(ranks) - {dist.get_rank()}):
                count *= len(ranks)
                found.update(ranks)
        is_world |= count == dist.get_world_size()
    return layouts, others, is_world


def team_of(module: object, what: str, purpose: str = "checkpoint") -> Team:
    """Return all ranks over whose meshes ``module`` is sharded, which call ``what``.

    Waits until all of them call, before any is sent; all ranks for a plain module.

    Collective: for each mesh that has a replicate group and does not hold all ranks, an
    all-gather of objects over the shard group, and over each dim of the meshes of
    DTensors, in every call; at the first call with these ranks, the creation of the
    gloo group. None for a mesh of all ranks after the first call.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Team(None)
    layouts, others, is_world = _meshes(module)
    # Groups in the store: a rank that is alone would wait to create the team's own. The
    # ranks of a smaller mesh know only their rows and columns, which meet in turn.
    pairs = chain.from_iterable((each.shard, each.replicate) for each in layouts)
    groups = [dist.group.WORLD] if is_world else [*pairs, *others]
    several = [group for group in groups if group is not None and group.size() > 1]
    way_out = f"Call {what} on every rank, outside of any 'if rank == 0'."
    wrong: TypeError | None = None
    if not isinstance(module, nn.Module):
        wrong = TypeError(f"expected a module, got a {type(module).__name__}.")
        way_out = f"This call will raise in any case: {wrong}"
    try:
        meet(dict.fromkeys(several), Call(what, way_out=way_out))
    except DesyncError as error:
        # To a rank without a module the others may never come.
        if wrong is None:
            raise
        raise wrong from error
    # A rank that is lost must not be waited for longer here than in training.
    timeout = min((group_timeout(each.shard) for each in layouts), default=None)
    ranks = set[int]()
    if is_world:
        ranks, layouts = set(range(dist.get_world_size())), []
    for layout in layouts:
        # Together, the replicate groups of all ranks in the shard group are the mesh.
        rows = [ranks_of(layout.shard)]
        if layout.replicate is not None:
            own = ranks_of(layout.replicate)
            rows = collectives.all_gather_object(own, layout.shard)
        ranks.update(*rows)
    # Each dim of a DTensor's mesh widens it; meshes are rectangles, alike on all ranks.
    if len(ranks) < dist.get_world_size():
        for group in others:
            ranks.update(*collectives.all_gather_object(sorted(ranks), group))
    members = tuple(sorted(ranks))
    return Team(private_group(members, purpose, timeout), members)


Ranks = tuple[int, ...]
Told = Mapping[Ranks, str]
"""A digest of the reads that a rank shares with each set of ranks."""
_SMALL = 1 << 20
"""Tensors of fewer bytes are not cut between two readers."""
_BUFFER = 1 << 24
"""The most bytes of a message, but for a tensor whose elements are not in order."""


class SharedReads:
    """The reads of a load that other ranks make as well."""

    def __init__(self, team: Team, copies: Sequence[Copy], *, is_local: bool) -> None:
        self._team = team
        self._alone: list[Copy] = []
        self._by_ranks: dict[Ranks, list[Copy]] = {}
        for copy in copies:
            ranks = () if copy.holders is None else copy.holders()
            if ranks is None:
                ranks = () if is_local else team.ranks
            mine = self._by_ranks.setdefault(ranks, []) if ranks else self._alone
            mine.append(copy)
        self.told: Told = {r: _digest(each) for r, each in self._by_ranks.items()}
        self._messages: list[tuple[dist.ProcessGroup, int, list[Copy]]] = []
        """In order, each with the group and the rank there that sends it."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def divide(self, everyone: Sequence[Told]) -> list[Copy]:
        """Return the reads of this rank: its own, and its part of shared ones.

        Collective: the creation of a gloo group per set of ranks, at the first call.
        """
        team = self._team
        by_rank = dict(zip(team.ranks, everyone, strict=True))
        reads = list(self._alone)
        # Small sets first, on all ranks: two never wait for each other in other groups.
        for ranks in sorted(self._by_ranks, key=lambda each: (len(each), each)):
            copies, mine = self._by_ranks[ranks], self.told[ranks]
            # A rank that has failed tells nothing, and then nobody waits for it.
            if any(by_rank.get(rank, {}).get(ranks) != mine for rank in ranks):
                reads += copies
                continue
            group = team.group
            if group is None or ranks != team.ranks:
                group = team.group_of(ranks, "shared reads")
            parts = _divided(copies, len(ranks))
            reads += parts[group.rank()]
            for reader, part in enumerate(parts):
                self._messages += [(group, reader, each) for each in _messages(part)]
        # Here, where a failure still reaches the other ranks.
        sizes = [sum(aligned(e.into.nbytes) for e in m) for _, _, m in self._messages]
        size = max(sizes, default=0)
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return reads

    @torch.no_grad()
    def send(self) -> None:
        """Fill the elements that other ranks have read.

        Collective: broadcasts over the groups of ranks that share reads, on the CPU;
        all ranks of the team must call, after each has filled its own elements.
        """
        for group, reader, message in self._messages:
            places, end = [], 0
            for each in message:
                part = self._buffer[end : end + each.into.nbytes].view(each.into.dtype)
                places.append((part.view(each.into.shape), each.into))
                end += aligned(each.into.nbytes)
            mine = group.rank() == reader
            for part, into in places if mine else ():
                part.copy_(into)
            collectives.broadcast(self._buffer[:end], group, rank=reader)
            for part, into in () if mine else places:
                into.copy_(part)


def _digest(copies: Sequence[Copy]) -> str:
    """Return a text that differs if other elements are read, or sent in other ways."""
    told = hashlib.sha256()
    for each in copies:
        into = each.into
        what = each.name, each.state, each.span
        form = (into.dtype, into.device.type, tuple(into.shape), is_plain(into))
        told.update(repr((what, form, into.is_contiguous())).encode())
    return told.hexdigest()[:32]


def _divided(copies: Sequence[Copy], parts: int) -> list[list[Copy]]:
    """Return the copies in ``parts`` runs of about as many bytes, in order."""
    total = sum(copy.into.nbytes for copy in copies)
    found: list[list[Copy]] = [[] for _ in range(parts)]
    at = 0
    for copy in copies:
        done, numel, size = 0, copy.into.numel(), copy.into.itemsize
        # Neighbours stay with a reader: few blocks are read twice.
        is_cut = copy.into.nbytes >= _SMALL and copy.into.is_contiguous()
        while done < numel:
            reader, count = at * parts // total, numel - done
            if is_cut:
                end = -(-(reader + 1) * total // parts)
                count = min(count, -(-(end - at) // size))
            found[reader].append(_cut(copy, done, done + count))
            done += count
            at += count * size
    return found


def _cut(copy: Copy, begin: int, end: int) -> Copy:
    """Return the read of elements ``[begin, end)`` of the destination of ``copy``."""
    if end - begin == copy.into.numel():
        return copy
    into = copy.into.view(-1)[begin:end]
    return copy._replace(span=copy.span.part(begin, end), into=into)


def _messages(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Yield the copies in lists that a single broadcast sends."""
    waiting: list[Copy] = []
    held = 0
    for copy in copies:
        into = copy.into
        step = _BUFFER // into.itemsize if into.is_contiguous() else into.numel()
        for begin in range(0, into.numel(), max(step, 1)):
            piece = _cut(copy, begin, min(begin + step, into.numel()))
            nbytes = aligned(piece.into.nbytes)
            if waiting and held + nbytes > _BUFFER:
                yield waiting
                waiting, held = [], 0
            waiting.append(piece)
            held += nbytes
    if waiting:
        yield waiting
