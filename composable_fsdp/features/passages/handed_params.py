"""Full parameters that ``unshard`` has handed to a user, who may keep them.

Such a parameter shows this rank's rows once its unit is sharded again, and the unit
continues with new full parameters. As long as a graph reads the parameter, the memory
stays. ``sys.getrefcount`` tells whether a parameter was kept.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from sys import getrefcount

import torch

from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.precision import renew_full_leaves
from composable_fsdp.flat.residency import (
    UNSHARDED,
    leave_full,
    make_unreadable,
)
from composable_fsdp.phases import BACKWARD_PRE
from composable_fsdp.planning.dtensors import is_dtensor
from composable_fsdp.runtime.grad_hooks import make_nodes


def hand_out(handle: FlatParamHandle) -> None:
    """Note that modules will show full parameters to the user."""
    form = handle.form
    # In a slot of an arena other units write to the memory.
    if (
        form.needs_gather
        and form.slot is None
        and handle.residency is not UNSHARDED
        and form.handed is None
    ):
        form.handed = partial(_take_back, _references(handle))


def _take_back(before: tuple[int, ...], handle: FlatParamHandle) -> bool:
    """Make kept parameters of a unit that is being resharded show the shards.

    The modules show the sharded parameters already.

    Returns: whether the memory must stay, because a graph reads parameters that the
    user has kept. A decision of this rank: all ranks gather again alike.
    """
    kept = _references(handle) != before
    if handle.phase is BACKWARD_PRE:
        if kept:
            make_unreadable(handle)
        return kept
    handle.form.handed = None
    if not (kept or _is_viewed(handle)):
        return False
    make_unreadable(handle)
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
    return False


def _references(handle: FlatParamHandle) -> tuple[int, ...]:
    """Return the number of Python references to each full leaf."""
    return tuple([getrefcount(leaf) for leaf in handle.form.placed])


def _is_viewed(handle: FlatParamHandle) -> bool:
    """Return whether others than the package view the memory of the full buffers."""
    for region in handle.layout.regions:
        full = region.full
        if not full.is_cut or not memory.is_allocated(full.buffer):
            continue
        storage = full.buffer.untyped_storage()
        # The buffer, and ``storage`` itself.
        own = 2 + len(full.leaves) + (full.own_slice is not None) + len(full.own_parts)
        if torch._C._storage_Use_Count(storage._cdata) > own:
            return True
    return False
