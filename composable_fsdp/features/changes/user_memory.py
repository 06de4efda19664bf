"""Parameters whose ``.data`` a user has replaced: the values move into new memory.

::

    kept = p.data; p.data = other       ``kept`` keeps the old memory of the shard
    p.data = buffer[a:b]                the shard gets a copy, and ``buffer`` stays

So no memory is written that a program holds; nor do a parameter and such memory follow
each other, which the log says.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.flat import memory
from composable_fsdp.flat.build import leaf_memory
from composable_fsdp.flat.build_region import fill_shard
from composable_fsdp.flat.gradients import new_shard, shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.dtensors import local_of

_log = logging.getLogger("composable_fsdp")


def is_in_shards(handle: FlatParamHandle) -> bool:
    """Return whether the leaves lie in the shards; if not, they do afterwards."""
    # ``leaf.data = torch.from_numpy(leaf.data.numpy())`` keeps the address and replaces
    # the storage. The difference matters for a unit that is kept unsharded: a changed
    # leaf leads to an all-gather, so all ranks must detect the change. Ranks without
    # elements detect the change by the storage.
    if any(map(_strangers, handle.layout.regions)):
        take_memory(handle)
        return False
    return True


@outside_transforms
def take_memory(handle: FlatParamHandle) -> None:
    """Make the shards hold the values of all leaves, and write to no other memory."""
    before = handle.writes.memory
    with memory.outside_inference(), torch.no_grad():
        for region in handle.layout.regions:
            if strangers := _strangers(region):
                if any(_is_held(leaf) for leaf in strangers):
                    _log.info(
                        "Parameters of unit %s were given memory that the program "
                        "holds: their values were copied, and later writes to either "
                        "do not reach the other.",
                        handle.name,
                    )
                # The user may hold the memory that the leaves were in, too.
                _move_shard(handle, region)
        for leaf, storage in zip(before.empty, before.storages, strict=True):
            if leaf.untyped_storage() is not storage:
                leaf.data = torch.empty_like(leaf)
    handle.writes.memory = leaf_memory(handle.layout)


def _strangers(region: FlatParameter) -> list[nn.Parameter]:
    """Return the leaves with elements outside the shard."""
    homes, _ = shard_views(region.cuts, region.shard)
    storage = region.shard.untyped_storage()
    return [
        leaf
        for leaf, home in zip(region.leaves, homes, strict=True)
        if leaf.numel()
        and not (memory.is_at(leaf, home) and leaf.untyped_storage() is storage)
    ]


def _is_held(leaf: nn.Parameter) -> bool:
    """Return whether others than ``leaf`` have its memory."""
    storage = leaf.untyped_storage()
    # One more for ``storage``. ``_storage_Use_Count`` is private, checked on torch 2.13
    # and 2.11.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


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
        if not full.is_own:
            views += map(local_of, full.leaves)
    found = {id(v): v for v in views if v.untyped_storage() is old}
    memory.move(found.values(), fresh, since=int(region.shard.storage_offset()))
    homes, _ = shard_views(region.cuts, region.shard)
    for leaf, home in zip(region.leaves, homes, strict=True):
        if leaf.numel():
            leaf.data = home
