"""Meshes of a simulated world: of real numbers, on the CPU, and forgotten at the end.

A script makes its meshes as it does for a training, ``init_device_mesh("cuda", (8, 4),
..)``, while tensors are fake and on the CPU.

Private, checked on torch 2.13: ``torch.utils._python_dispatch._disable_current_modes``,
``torch.distributed.tensor._redistribute``, ``_clear_sharding_prop_cache``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from composable_fsdp.tools.simulated_world import replaced


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make new tensors in this block real, on the CPU, also inside of fake or meta."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


@contextmanager
def simulated_meshes() -> Iterator[None]:
    """Let meshes in this block have real ranks, and tensors on the CPU.

    The caches of DTensor hold meshes, whose groups are destroyed behind the block. So
    the caches are empty at the start and at the end of the block.
    """

    def outside(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            # The ranks of a mesh are read as numbers, which fake tensors do not have.
            with _plain_tensors():
                return method(*args, **kwargs)

        return run

    plain = outside(DeviceMesh.__init__)

    @functools.wraps(DeviceMesh.__init__)
    def make(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        # ``init_device_mesh`` has made it, of all ranks in their order.
        ranks = kwargs.get("_rank_map")
        if isinstance(ranks, Tensor) and (ranks.is_meta or type(ranks) is FakeTensor):
            with _plain_tensors():
                kwargs["_rank_map"] = torch.arange(
                    ranks.numel(), dtype=torch.int, device="cpu"
                )
        # Fake tensors of a step are on the CPU, also if the script trains on GPUs.
        plain(self, "cpu", *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(DeviceMesh, "__init__", make))
        for name in ("__getitem__", "_flatten"):
            method = outside(getattr(DeviceMesh, name))
            stack.enter_context(replaced(DeviceMesh, name, method))
        _forget_meshes()
        stack.callback(_forget_meshes)
        yield


def _forget_meshes() -> None:
    """Empty the caches of DTensor, which hold meshes."""
    # Without the module there is no DTensor, and its import takes a second.
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch has no types
    for each in vars(_redistribute).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    # A dict, in versions of torch that have it.
    getattr(_redistribute, "_planner_cache", {}).clear()
