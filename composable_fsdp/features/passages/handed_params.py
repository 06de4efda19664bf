"""Full parameters that ``unshard`` has handed to a user, who may keep them."""

from __future__ import annotations

from collections import OrderedDict
from sys import getrefcount

import torch

from composable_fsdp.flat import memory
from composable_fsdp.flat.build import renew_full_leaves
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import (
    SHARDED,
    UNSHARDED,
    leave_full,
    make_unreadable,
    shard_versions,
)
from composable_fsdp.phases import BACKWARD_POST, BACKWARD_PRE
from composable_fsdp.planning.dtensors import is_dtensor
from composable_fsdp.runtime.grad_hooks import make_nodes
from composable_fsdp.runtime.graph_task import current_task


def hand_out(handle: FlatParamHandle) -> None:
    """Note that modules will show full parameters to the user."""
    form = handle.form
    # In a slot of an arena other units write to the memory.
    if (
        form.needs_fill
        and form.arena_slot is None
        and handle.residency is not UNSHARDED
        and form.handed is None
    ):
        # An evaluation before backward ends the phase, but not the graph, whose saved
        # tensors view the memory.
        waits = handle.phase is BACKWARD_PRE or _is_viewed(handle)
        read_at = shard_versions(handle) if waits else ()
        form.handed = _Handed(_references(handle), read_at)


class _Handed:
    """Takes kept parameters of a unit back, at a reshard or after an optimizer step."""

    def __init__(self, before: tuple[int, ...], read_at: tuple[int, ...]) -> None:
        self._before = before
        self._read_at = read_at
        """``shard_versions`` when a graph that reads the parameters was met last."""

    def __call__(self, handle: FlatParamHandle) -> bool:
        """Make kept parameters show the shards; return if their memory must stay."""
        waits = handle.phase is BACKWARD_PRE
        if waits or handle.phase is BACKWARD_POST or current_task() != NO_TASK:
            self._read_at = shard_versions(handle)
        kept = _references(handle) != self._before
        # A graph that waits for its first backward views the memory, too.
        viewed = (
            not waits
            and any(map(memory.is_allocated, handle.form.fulls))
            and _is_viewed(handle)
        )
        # The graph may be retained for a further backward, also by a rank that has kept
        # nothing. A step or a write, which makes all values old, ends that.
        if self._read_at == shard_versions(handle):
            if kept:
                make_unreadable(handle)
            elif viewed:
                leave_full(handle)
            return kept
        handle.form.handed = None
        if kept or viewed:
            _replace_leaves(handle)
        return False


def _replace_leaves(handle: FlatParamHandle) -> None:
    """Give the unit new full leaves; the old ones show the shards from now on."""
    make_unreadable(handle)
    for buffer in handle.form.fulls:
        memory.allocate(buffer)  # a step comes when the unit may have given it up
    # Leaving inference mode enables gradients, without which there are no nodes.
    with torch.inference_mode(False):
        # Views that the user has made keep the old memory.
        leave_full(handle)
        for full, new, leaf in renew_full_leaves(handle):
            new._post_accumulate_grad_hooks = full._post_accumulate_grad_hooks
            full._post_accumulate_grad_hooks = OrderedDict()
            if not is_dtensor(full):
                full.data = leaf.data
        make_nodes(handle)
    if handle.residency is SHARDED:
        # After a step: no reshard follows that would free the new memory, which nothing
        # has used.
        for buffer in handle.form.fulls:
            memory.free(buffer)


def _references(handle: FlatParamHandle) -> tuple[int, ...]:
    """Return the number of Python references to each full leaf."""
    return tuple([getrefcount(leaf) for leaf in handle.form.placed])


def _is_viewed(handle: FlatParamHandle) -> bool:
    """Return whether others than the package view the memory of the full buffers."""
    for region in handle.layout.regions:
        full = region.full
        if not full.is_own:
            continue
        storage = full.buffer.untyped_storage()
        # The buffer, and ``storage`` itself.
        own = 2 + len(full.leaves) + (full.own_slice is not None)
        if torch._C._storage_Use_Count(storage._cdata) > own:
            return True
    return False
