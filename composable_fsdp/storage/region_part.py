"""The entries of a rank's share of a region: parameters and element-wise states.

::

    entry of the region     | a | b | c | padding |      elements of this rank's share
    entry of its state m    | m | 0 | m |    0    |      zeros where b has no such state

Divides among replicas the writing of equal values.

::

    replica 0   part 0 of shard r of a large region    small region 1    parameter A
    replica 1   part 1 of shard r of a large region    small region 2    parameter B

Every rank computes all shares from layouts, sizes and numbers of ranks, which are equal
on all ranks; nothing is sent. A manifest says only how many shards a region has: a
region of two shards that four replicas wrote in parts is a region of eight shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.naming import quoted
from composable_fsdp.planning.save_parts import by_turns, writers_of
from composable_fsdp.storage.contents import HeldRegion, HeldTensor, is_elementwise
from composable_fsdp.storage.cuts import is_whole
from composable_fsdp.storage.file_part import FilePart, Kinds, RegionPart, StateKey
from composable_fsdp.storage.manifest import Json, Slot, require_storable
from composable_fsdp.storage.same_on_ranks import text_of
from composable_fsdp.storage.writer import Piece, shard_pieces

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


States = Mapping[int, dict[str, Any]]
"""The optimizer state of each parameter, by the ``id`` of the parameter."""
_Cut = tuple[int, Tensor, int, int]
"""An element of the entry, and elements ``[low, high)`` of the tensor from there on."""
_Members = dict[StateKey, list[tuple[int, _Cut]]]
"""Per state, the slots of the parameters that have the state, with their elements."""


def region_part(
    held: HeldRegion,
    share: Share,
    states: States,
    encoded: Callable[[str, Any, str], Json],
) -> tuple[RegionPart, list[Piece]]:
    """Return the description and the entries of this rank's share of a region.

    A shard that replicas share is a shard per part in the manifest.

    Raises: CheckpointError, for tensors that cannot be stored.
    """
    layout, region = held.region.layout, held.region
    first = held.params[0].names[0] if held.params else ""
    require_storable(layout.dtype, quoted(first))
    key = f"region.{held.unit}.{held.index}"
    part = RegionPart(
        held.unit,
        held.index,
        region.rank * share.parts + share.number,
        layout.world_size * share.parts,
        layout.dtype,
        share.numel,
        first,
        key,
        {},
    )
    members = _members(part, held, share, states, encoded)
    # The tensor itself and no copy: the elements are read when the file is written.
    shard = [(0, region.shard, share.start, share.stop)]
    pieces = [_piece(key, layout.dtype, share.numel, shard)]
    for (name, kind), found in members.items():
        dtype = found[0][1][1].dtype
        require_storable(dtype, f"optimizer state {name!r} of {part.first!r}")
        # The dtype is part of the key only if several entries of the region have the
        # name.
        is_alone = len({k for k in members if k[0] == name}) == 1
        entry = f"{key}.{name}" if is_alone else f"{key}.{name}.{dtype}"
        part.states[name, kind] = dtype, tuple(i for i, _ in found), entry
        pieces.append(_piece(entry, dtype, share.numel, [cut for _, cut in found]))
    # The values are added by ``merge``: they come from other ranks' parts, too.
    if part.shard == 0:
        part.slots = tuple(
            Slot(param.names, param.shape, param.ref.slot.offset, {})
            for param in held.params
        )
    return part, pieces


def _members(
    part: RegionPart,
    held: HeldRegion,
    share: Share,
    states: States,
    encoded: Callable[[str, Any, str], Json],
) -> _Members:
    """Return the element-wise states; add the others to ``part``.

    Raises: CheckpointError, for a state that is neither element-wise nor a scalar.
    """
    layout, region = held.region.layout, held.region
    members: _Members = {}
    for i, param in enumerate(held.params):
        # This rank has no element of the parameter, so an optimizer need not keep the
        # state here up to date. A rank with elements writes the state.
        if i in region.absent:
            continue
        ref, fqn = param.ref, param.names[0]
        # Computed by ``ref`` on each access.
        slot, leaf, offset = ref.slot, ref.leaf, ref.offset
        holders = layout.holders(slot)
        for name, value in states.get(id(leaf), {}).items():
            # An entry has a single dtype, so parameters whose states differ in dtype
            # get separate entries of the region.
            if is_elementwise(name, value, leaf, fqn):
                low = min(max(offset, share.start), share.stop)
                high = max(min(offset + value.numel(), share.stop), low)
                # Another replica has all elements. A parameter without any is told by
                # all, as ``merge`` expects.
                if low < high or not slot.numel:
                    at = low - share.start, value, low - offset, high - offset
                    members.setdefault((name, str(value.dtype)), []).append((i, at))
                continue
            # All replicas have the value, and the first part tells.
            if share.number:
                continue
            if len(holders) > 1:
                # ``merge`` compares the texts: the checkpoint has a single value.
                where = f"optimizer state {name!r} of {quoted(fqn)}"
                part.shared.setdefault(i, {})[name] = text_of(value, where)
            if holders[0] == region.rank:
                part.values.setdefault(i, {})[name] = encoded(name, value, fqn)
    return members


def _piece(key: str, dtype: torch.dtype, numel: int, cuts: Sequence[_Cut]) -> Piece:
    """Return the entry of a share of a shard, which holds ``cuts`` and zeros."""
    return Piece(key, dtype, (numel,), partial(_elements, cuts, numel, dtype))


def _elements(
    cuts: Sequence[_Cut], numel: int, dtype: torch.dtype
) -> Iterator[Tensor | int]:
    """Yield the elements of an entry, with zeros beside the cuts."""
    parts = (
        # Most are whole, and need no view.
        (at, value if high - low == value.numel() else value.reshape(-1)[low:high])
        for at, value, low, high in cuts
    )
    return shard_pieces(parts, numel, dtype.itemsize)


def kinds_of(regions: Iterable[HeldRegion], states: States) -> Kinds:
    """Return the element-wise states that each region has on this rank.

    Of the whole shard, and so equal on all replicas, whichever share they write.

    Raises: CheckpointError, for a state that is neither element-wise nor a scalar.
    """
    return {
        (held.unit, held.index): {
            (name, str(value.dtype)): value.dtype
            for i, param in enumerate(held.params)
            if i not in held.region.absent
            for name, value in states.get(id(param.ref.leaf), {}).items()
            if is_elementwise(name, value, param.ref.leaf, param.names[0])
        }
        for held in regions
    }


def add_missing(part: FilePart, pieces: list[Piece], told: Iterable[Kinds]) -> None:
    """Add entries of zeros for states of regions that only other shares have."""
    # This share has no element of the parameters with such a state, so zeros lose
    # nothing. If it has elements, the slots stay empty here, and ``merge`` raises.
    everyone: Kinds = {}
    for kinds in told:
        for region, states in kinds.items():
            everyone.setdefault(region, {}).update(states)
    for own in part.regions:
        for (name, kind), dtype in everyone[own.unit, own.index].items():
            if (name, kind) in own.states:
                continue
            entry = f"{own.key}.{name}"
            # A state of the same name and another dtype already has an entry with this
            # key.
            if entry in part.tensors:
                entry = f"{entry}.{dtype}"
            own.states[name, kind] = dtype, (), entry
            # ``make`` has already listed the other entries in ``part.tensors``.
            part.tensors[entry] = dtype, (own.shard_numel,)
            pieces.append(_piece(entry, dtype, own.shard_numel, []))
