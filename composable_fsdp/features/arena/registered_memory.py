"""Memory that the NCCL backend allocates, and registers with its communicators.

NCCL then sends from and into the memory without copies ("user buffers"). All ranks must
allocate and register in the same order, as arenas do, whose slots follow from the plan.
Methods of the backend that are private in parts of torch are used as in 2.13 and 2.11.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.comm.groups import GroupRef, RankLayout
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.planner import Target

_NEEDED = ("mem_allocator", "register_mem_pool", "eager_connect_single_device")


class RegisteredMemory:
    """A pool of memory over the communicators of ``groups``, for one device."""

    __slots__ = ("_device", "_groups", "_pool")

    def __init__(self, device: torch.device, groups: Sequence[GroupRef]) -> None:
        self._device, self._groups = device, tuple(groups)
        self._pool: Any = None

    def allocating(self) -> AbstractContextManager[object]:
        """Return a context in which torch allocates memory of the pool."""
        # No communicator: all groups have a single rank.
        if not self._groups:
            return nullcontext()
        if self._pool is None:
            allocator = backend_of(self._groups[0].get(), self._device).mem_allocator
            self._pool = torch.cuda.MemPool(allocator)
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def register(self) -> None:
        """Register the pool with the communicator of each group, in order.

        Collective: all ranks of each group create the communicator, if there is none.
        """
        for group in self._groups:
            backend = backend_of(group.get(), self._device)
            # torch registers with a communicator that exists; the first collective
            # would create the communicator.
            backend.eager_connect_single_device(self._device)
            backend.register_mem_pool(self._pool)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of ``group`` for ``device``."""
    return group._get_backend(device)


def refuse_arenas(
    targets: Iterable[Target], ranks: RankLayout, device: torch.device
) -> None:
    """Refuse arenas of memory that cannot be registered. Raises: PlanError."""
    for target in targets:
        arena = target.plan.options.arena
        if arena is not None and arena.comm_memory:
            refuse_without_nccl(device, ranks)


def refuse_without_nccl(device: torch.device, ranks: RankLayout) -> None:
    """Refuse ``Arena(comm_memory="nccl")`` where NCCL does not send.

    Raises: PlanError, also if this torch registers no memory.
    """
    if device.type != "cuda" or not ranks.is_nccl:
        raise PlanError(
            "Arena(comm_memory='nccl') needs GPUs and a process group with the NCCL "
            f"backend; the compute device is {device}, and the backend "
            f"{'NCCL' if ranks.is_nccl else 'another'}. Leave comm_memory out, or call "
            "init_process_group('nccl') and pass device_id."
        )
    backend = dist.ProcessGroupNCCL
    missing = [name for name in _NEEDED if not hasattr(backend, name)]
    if missing:
        raise PlanError(
            f"Arena(comm_memory='nccl') needs {', '.join(missing)} of torch's NCCL "
            f"backend, which torch {torch.__version__} lacks. Leave comm_memory out."
        )
