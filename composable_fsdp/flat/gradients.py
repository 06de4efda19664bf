"""Memory of gradients that were cleared goes to the next forward's activations.

``.grad`` of the leaves are views, made once, of one flat gradient per region. After
``zero_grad`` no leaf shows them. If nobody else has one either, the memory below them
is taken away until the next reduction; else the holder keeps it, with its values, and
the next reduction makes another, as autograd would.

``torch.Tensor._use_count`` and ``torch._C._storage_Use_Count`` are private; used only
here, checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount

import torch
from torch import Tensor

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter, make_grad_shard

# The stubs know nothing of them.
_storage_uses: Callable[[int], int] = vars(torch._C)["_storage_Use_Count"]
_tensor_uses: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_use_count"]


class GradientMemory:
    """The memory of one flat gradient, and how many hold it when nobody else does."""

    __slots__ = ("holders", "is_freed", "nbytes", "parts", "storage")

    def __init__(self, region: FlatParameter) -> None:
        assert region.grad_shard is not None
        self.parts = (region.grad_shard, *region.grad_views)
        self.storage = region.grad_shard.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.is_freed = False
        self.holders = self.count()

    def count(self) -> tuple[int, int, int]:
        """How many hold the tensors, in Python and elsewhere, and their memory.

        Only to be compared: the tensors count themselves, and each other.
        """
        return (
            sum(map(getrefcount, self.parts)),
            sum(map(_tensor_uses, self.parts)),
            _storage_uses(self.storage._cdata),
        )


def ready_gradient(region: FlatParameter, *, rows: bool) -> None:
    """Give the flat gradient memory, if it has none. Sends nothing.

    Values are undefined where no leaf shows a gradient.
    """
    memory: GradientMemory | None = region.grad_memory
    if region.grad_shard is None:
        make_grad_shard(region, rows=rows)
        # Copies from the host and to it need memory that is there, and pinned.
        if not region.offload:
            region.grad_memory = GradientMemory(region)
    elif memory is not None and memory.is_freed:
        memory.storage.resize_(memory.nbytes)
        memory.is_freed = False


def free_cleared(handle: FlatParamHandle) -> None:
    """Take the memory of flat gradients that nothing shows. Sends nothing."""
    if handle.reduce_has_memory:
        return  # a reduction may be on its way into them
    for region in handle.trainable:
        memory: GradientMemory | None = region.grad_memory
        if memory is None or memory.is_freed:
            continue
        if region.flat is not None and region.flat.grad is not None:
            continue
        for leaf in region.leaves:
            if leaf.grad is not None:
                break
        else:
            if memory.count() == memory.holders:
                memory.storage.resize_(0)
                memory.is_freed = True
            else:
                region.grad_shard = region.grad_memory = None
                region.grad_views = region.grad_gaps = ()
