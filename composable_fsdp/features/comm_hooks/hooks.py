"""Communication hooks: a function of the user that replaces the gradient collectives.

Called per region and reduction, on its stream: ``hook(state, gradient, output)``, or
``hook(state, gradient)`` where nothing is cut. ``gradient`` ``(padded_numel,)`` may be
overwritten; the contents of ``output`` ``(shard_numel,)`` become the gradient.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.errors import FSDPError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.reduce_rule import split_factor


class DefaultState:
    """State of the default hooks: the process group and the two factors of the average.

    ``gradient_predivide_factor * gradient_postdivide_factor == world_size``.

    Raises: ValueError, without a process group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(
                f"{type(self).__name__} expects a process group, got None. Pass the "
                "one that the module is sharded over (torch.distributed.group.WORLD)."
            )
        self.process_group = process_group
        self.world_size = process_group.size()
        # Division before and after the sum avoids overflow and underflow in low
        # precision.
        before, after = split_factor(self.world_size)
        self.gradient_predivide_factor = before
        self.gradient_postdivide_factor = after


class LowPrecisionState(DefaultState):
    """State of the compressing hooks: the result is cast to ``parameter_type``."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        parameter_type: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


class ReplicaManager(Protocol):
    """What ``ReplicaState`` needs of a manager, such as ``torchft.Manager``."""

    def allreduce(self, tensor: Tensor) -> Any:
        """Average ``tensor`` over the replicas that are alive, in place.

        Returns: an object whose ``wait()`` returns once the result is there. An error
            is not raised; the manager then says that the step must not be taken.
        """
        ...


class ReplicaState(DefaultState):
    """State of ``replica_hook``: the ranks of this replica, and the manager.

    Raises: ValueError, without a process group; TypeError, if ``manager`` has no
    method ``allreduce``.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, manager: ReplicaManager
    ) -> None:
        super().__init__(process_group)
        average = getattr(manager, "allreduce", None)
        if not callable(average):
            raise TypeError(
                "ReplicaState expects a manager with a method allreduce, such as "
                f"torchft.Manager, got a {type(manager).__name__}."
            )
        self.manager = manager
        self.average = average


def replica_hook(
    state: ReplicaState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average over the ranks of this replica, and then over the living replicas.

    The group of replicas changes while training goes on, and no process group does, so
    the second average is the manager's. If a replica dies in it, the gradients are not
    valid, and the manager's ``should_commit()`` is False: drop them with ``zero_grad``
    and take no step.

    Args:
        state: the process group of this replica, and the manager.
        grad: the gradients of this rank ``(padded_numel,)``; divided in place.
        output: ``(shard_numel,)``, filled with the averages. Default None: this replica
            has a single rank, and the averages replace ``grad``.

    Collective: one reduce-scatter over the process group of ``state``, none without
        ``output``; and one all-reduce of the manager.
    """
    reduced = grad
    if output is not None:
        _reduce_scatter(state, grad, output, overwrite=True)
        reduced = output
    # ``wait`` orders the current stream, on which the gradient is read.
    state.average(reduced).wait()


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Average ``grad`` ``(numel,)`` over the process group of ``state``, in place.

    Collective: an all-reduce over that group.
    """
    _divide(grad, state.gradient_predivide_factor)
    collectives.all_reduce(grad, state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """Average ``grad`` and write this rank's slice into ``output``.

    Args:
        state: the process group and the factors.
        grad: the gradients of this rank ``(padded_numel,)``; divided in place.
        output: ``(shard_numel,)``, filled with the averages.

    Collective: one reduce-scatter over the process group of ``state``.
    """
    # A hook of the user may call this function and read ``grad`` afterwards.
    _reduce_scatter(state, grad, output, overwrite=False)


def _reduce_scatter(
    state: DefaultState, grad: Tensor, output: Tensor, *, overwrite: bool
) -> None:
    """Do as ``reduce_scatter_hook``; ``overwrite``: the values of ``grad`` are lost."""
    _divide(grad, state.gradient_predivide_factor)
    collectives.reduce_scatter_flat(
        [output], [grad], state.process_group, overwrite=overwrite
    )
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average in float16 and cast the result to ``state.parameter_type``.

    Args:
        state: the process group, the factors and the dtype of the result.
        grad: the gradients of this rank ``(padded_numel,)``.
        output: ``(shard_numel,)``, filled with the averages. Default None: the averages
            replace the data of ``grad``.

    Collective: one reduce-scatter over the process group of ``state``; without
        ``output`` one all-reduce.
    """
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Do as ``fp16_compress_hook``, in bfloat16."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(
    dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None
) -> None:
    small = grad.to(dtype)
    if output is None:
        allreduce_hook(state, small)
        # ``.data``: the result may have another dtype than the argument.
        grad.data = small.to(state.parameter_type)
    else:
        part = torch.empty_like(output, dtype=dtype)
        # ``grad.to`` returns ``grad`` itself if the dtype is the same.
        _reduce_scatter(state, small, part, overwrite=small is not grad)
        output.data = part.to(state.parameter_type)


def _divide(tensor: Tensor, factor: float) -> None:
    # A factor of 1 launches no kernel.
    if factor > 1:
        tensor.div_(factor)


def reduce_by_hook(handle: FlatParamHandle) -> None:
    """Have the communication hook of the user reduce every region.

    Raises: FSDPError, if a result has not ``shard_numel`` elements.
    """
    rule = handle.rule
    assert rule.hook is not None
    for region in chain.from_iterable(handle.layout.reduce_groups):
        # Pass detached tensors: a hook may give them other memory through ``.data``.
        result = gradient = region.reduce.buffer.detach()
        if region.reduce.partial is not None:
            gradient.add_(region.reduce.partial)
        # A shard group of a single rank needs no scatter: the hook reduces in place.
        if region.layout.world_size == 1:
            rule.hook(rule.hook_state, gradient)
        else:
            assert region.reduce.temporary is not None
            result = region.reduce.temporary.detach()
            rule.hook(rule.hook_state, gradient, result)
        if result.numel() != region.layout.shard_numel:
            raise FSDPError(
                f"A communication hook left {result.numel()} elements; expected the "
                f"{region.layout.shard_numel} of this rank's shard. Write the reduced "
                "gradient into the last argument and keep its size."
            )
        region.reduce.temporary = result
        region.reduce.partial = None  # added already
