"""Reads values once that several ranks of a load hold: each a part, sent to the others.

::

    elements of both replicas    | a   b   c | d          e |
    replica 0 reads, verifies    | a   b   c |              |
    replica 1 reads, verifies    |           | d          e |
    all ranks agree
    0 sends a b c to 1, 1 sends d e to 0, by a buffer of 16 MiB

Replicas hold equal shards, and all ranks equal tensors in no unit. Ranks compare
digests of what they are about to read; ranks that would differ read for themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.comm.nodes import group_timeout, private_group
from composable_fsdp.storage.source import Copy
from composable_fsdp.storage.staging import aligned, is_plain
from composable_fsdp.storage.team import Team

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
            if ranks != team.ranks:
                limit = group_timeout(team.group)
                group = private_group(ranks, "shared reads", limit)
            assert group is not None
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
        while done < numel:
            reader = at * parts // total
            count = numel - done
            # Neighbours stay with a reader: few blocks are read twice.
            if copy.into.nbytes >= _SMALL and copy.into.is_contiguous():
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
