"""Divides among replicas the writing of equal values.

::

    replica 0   part 0 of shard r of a large region    small region 1    parameter A
    replica 1   part 1 of shard r of a large region    small region 2    parameter B

Every rank computes all shares from layouts, sizes and numbers of ranks, which are equal
on all ranks; nothing is sent. A manifest says only how many shards a region has: a
region of two shards that four replicas wrote in parts is a region of eight shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.planning.save_parts import by_turns, writers_of
from composable_fsdp.storage.contents import HeldRegion, HeldTensor
from composable_fsdp.storage.cuts import is_whole

SMALL = 1 << 20
"""Tensors in no unit of fewer bytes are written by rank 0, beside each other."""


class Share(NamedTuple):
    """Elements ``[start, stop)`` of this rank's shard, part ``number`` of ``parts``.

    ``numel`` is the size of a part; the last part may end in padding.
    """

    number: int
    parts: int
    start: int
    stop: int
    numel: int

    @staticmethod
    def of(shard_numel: int, number: int, parts: int) -> Share:
        """Return a part of a shard."""
        # Rounded up: a manifest knows a single size of all shards of a region, so the
        # last part gets the padding.
        numel = -(-shard_numel // parts)
        start = min(number * numel, shard_numel)
        return Share(number, parts, start, min(start + numel, shard_numel), numel)


def shares_of(regions: Sequence[HeldRegion]) -> list[tuple[HeldRegion, Share]]:
    """Return this rank's shares of the regions that are stored as shards.

    Regions of which this replica writes nothing are left out.
    """
    # Of all regions at once: the turns of small regions balance over the model, and
    # each replica finds the same turns.
    whole = [held for held in regions if is_whole(held)]
    shares = []
    layouts = [(held.region.layout, held.handle.groups.replicas) for held in whole]
    for held, writer in zip(whole, writers_of(layouts), strict=True):
        groups, numel = held.handle.groups, held.region.layout.shard_numel
        mine = _replica(groups)
        if writer is None:
            shares.append((held, Share.of(numel, mine, groups.replicas)))
        elif writer == mine:
            shares.append((held, Share.of(numel, 0, 1)))
    return shares


def cut_shares(regions: Sequence[HeldRegion]) -> list[HeldRegion]:
    """Return the regions of which parameters are stored alone, with this replica's.

    ``regions`` are as those of ``shares_of``.
    """
    regions = [held for held in regions if not is_whole(held)]
    # By the size of the whole parameter, which all ranks of the unit know: they must
    # take the same replica.
    sizes = [
        (
            (held.region.layout.world_size, held.handle.groups.replicas),
            held.handle.groups.replicas,
            param.ref.slot.numel * param.dtype.itemsize,
        )
        for held in regions
        for param in held.params
    ]
    turns = iter(by_turns(sizes))
    return [
        replace(
            held,
            params=tuple(
                param
                for param in held.params
                if next(turns) == _replica(held.handle.groups)
            ),
        )
        for held in regions
    ]


def tensors_of(
    tensors: Iterable[HeldTensor], rank: int, ranks: int
) -> list[tuple[int, HeldTensor]]:
    """Return the tensors in no unit that ``rank`` of a save writes, numbered."""
    listed = list(tensors)
    # The names, shapes and values of these tensors are compared over ranks before a
    # file is written: ranks that would take other turns end with an error.
    # Buffers may differ, and then rank 0's are told to be saved.
    sizes = [
        held.tensor.numel() * held.dtype.itemsize
        if isinstance(held.tensor, nn.Parameter)
        else 0
        for held in listed
    ]
    # What has no size stays with the first writer.
    items = [("", ranks, size if size >= SMALL else 0) for size in sizes]
    writers = by_turns(items)
    return [(i, each) for i, each in enumerate(listed) if writers[i] == rank]


def _replica(groups: Groups) -> int:
    """Return the number of this rank among the replicas of its shard."""
    group = groups.replicate
    return 0 if group is None else group.rank()
