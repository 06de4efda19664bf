"""Parameters whose ``.data`` a user has replaced: where their values live.

::

    p.data = torch.zeros(3)             the leaf alone holds the memory: the values move
    kept = p.data; p.data = other       ``kept`` views the shard, which gets new memory
    p.data = buffer[a:b]                the leaf stays there, and each iteration copies

So no memory is written that the plain model would not write, and a leaf and a buffer of
the user follow each other for as long as both exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.flat import memory
from composable_fsdp.flat.build import leaf_memory
from composable_fsdp.flat.build_region import fill_shard
from composable_fsdp.flat.gradients import new_shard, shard_views
from composable_fsdp.flat.handle import LEAVES, FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.flat.residency import shards_are_unchanged
from composable_fsdp.planning.dtensors import local_of


def leaves_view_shards(handle: FlatParamHandle) -> bool:
    """Return whether all leaves lie in the shards; stricter than their addresses."""
    # ``leaf.data = torch.from_numpy(leaf.data.numpy())`` keeps the address and replaces
    # the storage. The difference matters for a unit that is kept unsharded: a changed
    # leaf leads to an all-gather, so all ranks must detect the change. Ranks without
    # elements detect the change by the storage.
    return not any(_strangers(region) for region in handle.layout.regions)


def follow_user_memory(handle: FlatParamHandle) -> bool:
    """Copy leaves in memory of the user into the shard, if nothing else has changed."""
    here = handle.writes.memory
    if not here.away:
        return False
    handle.writes.memory = here._replace(addresses=here.shown)
    good = shards_are_unchanged(handle)
    handle.writes.memory = here
    if good:
        take_memory(handle)
    return good


@outside_transforms
def take_memory(handle: FlatParamHandle) -> None:
    """Make the shards hold the values of all leaves, and write to no other memory."""
    before = handle.writes.memory
    away, moved = set(map(id, before.away)), before.moved
    with memory.outside_inference(), torch.no_grad():
        for region in handle.layout.regions:
            strangers = _strangers(region)
            moved = moved or bool(strangers)
            if any(id(leaf) not in away for leaf, _ in strangers):
                # The user may hold the memory that the leaf was in.
                _move_shard(handle, region)
                continue
            for leaf, home in strangers:
                home.copy_(leaf.detach())
        for leaf, storage in zip(before.empty, before.storages, strict=True):
            if leaf.untyped_storage() is not storage:
                moved = True
                leaf.data = torch.empty_like(leaf)
        found = _leave_with_user(handle)
    handle.writes.memory = leaf_memory(handle.layout)._replace(away=found, moved=moved)


def write_to_user_memory(handle: FlatParamHandle) -> None:
    """Copy the shard into the leaves in memory of the user, after a write to it."""
    if handle.writes.memory.away:
        with torch.no_grad():
            for region in handle.layout.regions:
                for leaf, home in _strangers(region):
                    leaf.copy_(home)


def _strangers(region: FlatParameter) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the leaves with elements outside the shard, with their places in it."""
    homes, _ = shard_views(region.cuts, region.shard)
    storage = region.shard.untyped_storage()
    return [
        (leaf, home)
        for leaf, home in zip(region.leaves, homes, strict=True)
        if leaf.numel()
        and not (memory.is_at(leaf, home) and leaf.untyped_storage() is storage)
    ]


def _move_shard(handle: FlatParamHandle, region: FlatParameter) -> None:
    """Give the region new memory for its shard, with the values of the leaves."""
    old, layout = region.shard.untyped_storage(), region.layout
    fresh = new_shard(
        layout.shard_numel, layout.dtype, region.device, offload=region.offload
    )
    fill_shard(fresh, region.cuts, region.leaves, sharded=True)
    views: list[torch.Tensor] = [region.shard, *map(local_of, handle.block_leaves)]
    if region.flat is not None:
        views.append(region.flat)
    at = handle.layout.regions.index(region)
    fulls = [region.full]
    for form in (handle.form, handle.other_form):
        if form is not None:
            fulls += form.regions[at : at + 1]
            views += [shard for _, shard in form.fills]
    for full in fulls:
        if not full.is_cut:
            views += map(local_of, full.leaves)
    found = {id(v): v for v in views if v.untyped_storage() is old}
    memory.move(found.values(), fresh, since=int(region.shard.storage_offset()))


def _leave_with_user(handle: FlatParamHandle) -> tuple[nn.Parameter, ...]:
    """Move leaves whose memory nobody else holds into the shard; return the others."""
    groups: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
    for region in handle.layout.regions:
        for leaf, home in _strangers(region):
            if region.flat is not None:
                # The optimizer steps on the shard itself.
                leaf.data = home
            else:
                key = leaf.untyped_storage()._cdata
                groups.setdefault(key, []).append((leaf, home))
    if not groups:
        return ()
    others = {id(each): each for link in LEAVES.values() if (each := link())}
    others.pop(id(handle), None)
    elsewhere = [x for each in others.values() for x in each.writes.memory.away]
    away: list[nn.Parameter] = []
    for key, group in groups.items():
        same = [x for x in elsewhere if x.untyped_storage()._cdata == key]
        leaves = [leaf for leaf, _ in group] + same
        if _is_held(leaves):
            away += [leaf for leaf, _ in group]
        else:
            for leaf, home in group:
                leaf.data = home
    return tuple(away)


def _is_held(leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether more than ``leaves``, of one storage, may read their memory."""
    storage = leaves[0].untyped_storage()
    # One more for ``storage``. Memory that is not resizable may belong to numpy.
    # ``_storage_Use_Count`` is private, checked on torch 2.13 and 2.11.
    count = torch._C._storage_Use_Count(storage._cdata) - 1
    if count > len(leaves) or not storage.resizable():
        return True
    # Parameters that share elements must go on to share them.
    spans = sorted((leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes) for leaf in leaves)
    return any(end > begin for (_, end), (begin, _) in pairwise(spans)) or not all(
        leaf.is_contiguous() for leaf in leaves
    )
