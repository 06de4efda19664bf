"""All-gathers and reduce-scatters by an object of the user, as FSDP2 takes them.

The object has two methods: ``allocate(size, dtype=, device=)`` gives the buffers of a
collective, and calling the object hands the collective to a backend. The collective
runs in these buffers, and the copies are ours::

    all-gather       shard -copy-> allocated slice =object=> allocated -copy-> full
    reduce-scatter   full -copy-> allocated =object=> allocated slice -copy-> shard

An object is called once per region of a unit (a unit of equal dtypes usually has a
single region), with keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.sequence import Operation
from composable_fsdp.comm.works import Works


class Allocates(Protocol):
    """The part that both kinds of objects share."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a tensor of ``size``; the values do not matter."""


class CustomAllGather(Allocates, Protocol):
    """An all-gather of the user."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the inputs of all ranks, in rank order."""


class CustomReduceScatter(Allocates, Protocol):
    """A reduce-scatter of the user."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` by ``op``; rank *r* keeps slice *r* as the output."""


class _CopiedWorks(Works):
    """Calls of the user's object; the wait also copies their results."""

    __slots__ = ("_outputs", "_results")

    def __init__(
        self,
        works: Sequence[dist.Work],
        outputs: list[Tensor],
        results: list[Tensor],
    ) -> None:
        super().__init__(works)
        self._outputs, self._results = outputs, results

    def wait(self, limit: timedelta) -> None:
        """Wait for the calls, at most ``limit`` for each, and copy the results.

        Raises: RuntimeError, after ``limit`` or if the backend raises.
        """
        super().wait(limit)
        # Buffer by buffer: regions may have different dtypes.
        for output, result in zip(self._outputs, self._results, strict=True):
            output.copy_(result)


def all_gather(
    comm: CustomAllGather,
    full: Sequence[Tensor],
    shard: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
    operation: Operation,
) -> Operation | None:
    """Do as ``collectives.all_gather_flat``, by ``comm``.

    Returns: the operation if ``async_op``, else None.
    Raises: CollectiveError, if the backend raises; errors of ``comm``.
    Collective: a call of ``comm`` per buffer; every rank must call.
    """

    def start() -> _CopiedWorks:
        works, results = [], []
        for whole, part in zip(full, shard, strict=True):
            result = comm.allocate(whole.shape, dtype=whole.dtype, device=whole.device)
            # The input is a slice of the output, as backends prefer.
            own = result.narrow(0, group.rank() * len(part), len(part))
            own.copy_(part)
            works.append(
                comm(
                    output_tensor=result,
                    input_tensor=own,
                    group=group,
                    async_op=async_op,
                )
            )
            results.append(result)
        # An object that has waited itself returns None.
        return _CopiedWorks([w for w in works if w is not None], list(full), results)

    return operation.send(start, async_op=async_op)


def reduce_scatter(
    comm: CustomReduceScatter,
    shard: Sequence[Tensor],
    full: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    average: bool = False,
    overwrite: bool = False,
    async_op: bool = False,
    operation: Operation,
) -> Operation | None:
    """Do as ``collectives.reduce_scatter_flat``, by ``comm``.

    Returns: the operation if ``async_op``, else None.
    Raises: CollectiveError, if the backend raises; errors of ``comm``.
    Collective: a call of ``comm`` per buffer; every rank must call.
    """
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM

    def start() -> _CopiedWorks:
        works, results = [], []
        for part, whole in zip(shard, full, strict=True):
            allocate = partial(comm.allocate, dtype=whole.dtype, device=whole.device)
            given, result = allocate(whole.shape), allocate(part.shape)
            given.copy_(whole)
            works.append(
                comm(
                    output_tensor=result,
                    input_tensor=given,
                    group=group,
                    op=op,
                    async_op=async_op,
                )
            )
            results.append(result)
        return _CopiedWorks([w for w in works if w is not None], list(shard), results)

    return operation.send(start, async_op=async_op)
