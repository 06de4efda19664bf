"""Memory of gradients that were cleared goes to the next forward's activations.

``.grad`` of the leaves are views, made once, of one flat gradient per region. After
``zero_grad`` no leaf shows them. If nobody else has one either, the memory below them
is taken away until the next reduction; else the holder keeps it, with its values, and
the next reduction makes another, as autograd would.

``torch.Tensor._use_count`` and ``torch._C._storage_Use_Count`` are private; used only
here, checked on torch 2.13 (and present in 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount

import torch
from torch import Tensor

from composable_fsdp.flat import storage
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter, make_grad_shard

# The stubs know nothing of them.
_storage_uses: Callable[[int], int] = vars(torch._C)["_storage_Use_Count"]
_tensor_uses: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_use_count"]


def ready_gradients(handle: FlatParamHandle) -> None:
    """Give the flat gradients memory, if they have none. Sends nothing.

    Values are undefined where no leaf shows a gradient.
    """
    for region in handle.trainable:
        if region.grad_shard is None:
            make_grad_shard(region, rows=handle.rows)
            region.grad_holders = _holders(region)
        elif not region.offload:
            storage.allocate(region.grad_shard)


def free_cleared(handle: FlatParamHandle) -> None:
    """Take the memory of flat gradients that no leaf shows. Sends nothing."""
    if handle.reduce_has_memory:
        return  # a reduction may be on its way into them
    for region in handle.trainable:
        shard = region.grad_shard
        # Copies to the host need memory that is there, and pinned.
        if shard is None or region.offload or not storage.is_allocated(shard):
            continue
        for leaf in region.leaves:
            if leaf.grad is not None:
                break
        else:
            if _holders(region) == region.grad_holders:
                storage.free(shard)
            else:
                region.grad_shard = None
                region.grad_views = region.grad_gaps = ()


def _holders(region: FlatParameter) -> tuple[int, ...]:
    """How many hold the flat gradient or a part of it, in Python and elsewhere.

    Only to be compared: the tensors count themselves, and each other.
    """
    shard, parts = region.grad_shard, region.grad_views
    assert shard is not None
    return (
        getrefcount(shard),
        _tensor_uses(shard),
        sum(map(getrefcount, parts)),
        sum(map(_tensor_uses, parts)),
        _storage_uses(shard.untyped_storage()._cdata),
    )
