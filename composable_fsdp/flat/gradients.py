"""Memory of gradients that were cleared goes to the next forward's activations.

``.grad`` of the leaves are views, made once, of one flat gradient per region. After
``zero_grad`` no leaf shows them. If nobody else has one either, the memory below them
is taken away until the next reduction; else the holder keeps it, with its values, and
the next reduction makes another, as autograd would. Another is made, too, if the views
do not view it any more (``p.grad.data = ...``), or if it cannot be resized because
numpy or another process was given it.

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

    __slots__ = ("holders", "is_freed", "nbytes", "parts", "places", "storage")

    def __init__(self, region: FlatParameter) -> None:
        assert region.grad_shard is not None
        self.parts = (region.grad_shard, *region.grad_views)
        self.storage = region.grad_shard.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.is_freed = False
        self.places = [*map(Tensor.data_ptr, self.parts)]
        self.holders = self.count()

    def count(self) -> tuple[int, int, int, int]:
        """How many hold the tensors, in Python and elsewhere, and their memory.

        Only to be compared: the tensors count themselves, and each other.
        """
        return (
            sum(map(getrefcount, self.parts)),
            sum(map(_tensor_uses, self.parts)),
            getrefcount(self.storage),
            _storage_uses(self.storage._cdata),
        )

    def is_whole(self) -> bool:
        """Whether the views view it: not if a user replaced the data of one."""
        return self.places == [*map(Tensor.data_ptr, self.parts)]

    def is_ours(self) -> bool:
        """Whether nobody holds a part. None may be shown."""
        return self.count() == self.holders and self.is_whole()

    def resize(self, nbytes: int) -> None:
        """Give it memory, or take that away."""
        self.storage.resize_(nbytes)
        self.is_freed = not nbytes
        if nbytes:
            self.places = [*map(Tensor.data_ptr, self.parts)]


def ready_gradient(region: FlatParameter, *, rows: bool) -> None:
    """Give the flat gradient memory, if it has none. Sends nothing.

    Values are undefined where no leaf shows a gradient.
    """
    memory: GradientMemory | None = region.grad_memory
    if region.grad_shard is None:
        make_grad_shard(region, rows=rows)
        region.grad_memory = GradientMemory(region)
    elif memory is not None and memory.is_freed:
        memory.resize(memory.nbytes)


def leave_to_holders(region: FlatParameter) -> None:
    """Have the next gradient go to other memory, if this may not be written to.

    Nothing may be on its way into it. Sends nothing.
    """
    memory: GradientMemory | None = region.grad_memory
    if memory is None or memory.is_freed or region.in_flight is not None:
        return
    if not (memory.is_whole() if _is_shown(region) else memory.is_ours()):
        _forget(region)


def is_whole(region: FlatParameter) -> bool:
    """Whether the views of the flat gradient, if there is one, view it still."""
    memory: GradientMemory | None = region.grad_memory
    return memory is None or memory.is_whole()


def free_cleared(handle: FlatParamHandle) -> None:
    """Take the memory of flat gradients that nothing shows. Sends nothing."""
    if handle.reduce_has_memory:
        return  # a reduction may be on its way into them
    for region in handle.trainable:
        memory: GradientMemory | None = region.grad_memory
        # Copies from the host and to it need memory that is there, and pinned.
        if memory is None or memory.is_freed or region.offload or _is_shown(region):
            continue
        if memory.is_ours() and _is_resizable(memory.storage):
            memory.resize(0)
        else:
            _forget(region)


def _is_shown(region: FlatParameter) -> bool:
    """Whether a gradient is there that may be a part of the flat one."""
    if region.flat is not None and region.flat.grad is not None:
        return True
    for leaf in region.leaves:  # noqa: SIM110  # a generator would take longer
        if leaf.grad is not None:
            return True
    return False


def _is_resizable(memory: torch.UntypedStorage) -> bool:
    # Any CUDA memory says that it is shared; on the CPU, resizing would crash.
    return memory.resizable() and (memory.is_cuda or not memory.is_shared())


def _forget(region: FlatParameter) -> None:
    """Leave the flat gradient to whoever holds it; the next one is made anew."""
    region.grad_shard = region.grad_memory = None
    region.grad_views = region.grad_gaps = ()
