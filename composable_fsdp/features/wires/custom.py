"""All-gathers and reduce-scatters by an object of the user, as FSDP2 takes them.

An object is called once per region of a unit, in buffers that it allocates::

    all-gather       shard -copy-> allocated slice =object=> allocated -copy-> full
    reduce-scatter   full -copy-> allocated =object=> allocated slice -copy-> shard
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.settings import changed_units
from composable_fsdp.comm.operations import Operation
from composable_fsdp.comm.works import Works

CustomComm = Callable[..., "dist.Work | None"]
"""An object of the user: ``allocate(size, *, dtype, device)`` returns a tensor, and the
object is called with ``output_tensor``, ``input_tensor``, ``group``, ``async_op`` and,
as a reduce-scatter, ``op``."""


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
        """Wait for the calls, at most ``limit`` for each, and copy the results."""
        super().wait(limit)
        # Buffer by buffer: regions may have different dtypes.
        for output, result in zip(self._outputs, self._results, strict=True):
            output.copy_(result)


def _send(
    comm: Any,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    average: bool | None = None,
    overwrite: bool = False,
    async_op: bool = False,
    operation: Operation,
) -> Operation | None:
    """Do as ``collectives.all_gather_flat``, or, with ``average``, as its reduction.

    Collective: a call of ``comm`` per buffer.
    """
    how = {}
    if average is not None:
        how["op"] = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM

    def start() -> _CopiedWorks:
        works, results = [], []
        for output, given in zip(outputs, inputs, strict=True):
            allocate = partial(comm.allocate, dtype=given.dtype, device=given.device)
            # FSDP2 allocates the input of a reduction first, too.
            own = allocate(given.shape) if how else None
            result = allocate(output.shape)
            if own is None:
                # The input is a slice of the output, as backends prefer.
                own = result.narrow(0, group.rank() * len(given), len(given))
            own.copy_(given)
            call = partial(comm, output_tensor=result, input_tensor=own, group=group)
            works.append(call(async_op=async_op, **how))
            results.append(result)
        # An object that has waited itself returns None.
        return _CopiedWorks([w for w in works if w is not None], list(outputs), results)

    return operation.send(start, async_op=async_op)


def set_custom_all_gather(module: nn.Module, comm: CustomComm) -> None:
    """Gather the unit ``module`` in forward and backward by ``comm``; as in FSDP2.

    Collective: in a step the collectives of ``comm``.
    Raises: CompositionError, if ``module`` is no fully sharded module; TypeError, if
        ``comm`` cannot be called or does not allocate.
    """
    _require_comm("set_custom_all_gather", comm)
    for state in changed_units(module, "set_custom_all_gather", recurse=False):
        state.handle.rule.all_gather = partial(_send, comm)


def set_custom_reduce_scatter(module: nn.Module, comm: CustomComm) -> None:
    """Reduce the gradients of the unit ``module`` by ``comm``; as in FSDP2.

    Collective: in backward the collectives of ``comm``.
    Raises: as ``set_custom_all_gather``.
    """
    _require_comm("set_custom_reduce_scatter", comm)
    for state in changed_units(module, "set_custom_reduce_scatter", recurse=False):
        state.handle.rule.reduce_scatter = partial(_send, comm, average=False)


def _require_comm(name: str, comm: object) -> None:
    """Raise TypeError unless ``comm`` can be called and can allocate."""
    # By its methods: torch's base classes belong to FSDP2.
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{name} expects an object with the methods allocate and __call__, got "
            f"{type(comm).__name__}. Derive its class from FSDP2's AllGather or "
            "ReduceScatter, or write both methods."
        )
