"""Communication hooks: a user's function that replaces the gradient collectives."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.errors import FSDPError
from composable_fsdp.features.wires import decode_int8, encode_int8, int8_nbytes
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import split_factor


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


class ReplicaState(DefaultState):
    """State of ``replica_hook``: the ranks of this replica, and the manager.

    ``manager.allreduce(tensor)`` averages over the replicas that are alive, in place,
    and returns an object whose ``wait()`` returns once the result is there. An error is
    not raised; the manager then says that the step must not be taken.

    Raises: ValueError, without a process group; TypeError, if ``manager`` has no
    method ``allreduce``.
    """

    def __init__(self, process_group: dist.ProcessGroup, manager: Any) -> None:
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
        grad, output: as in ``fp16_compress_hook``.

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


INT8_BLOCK = 128


def int8_all_to_all_hook(
    state: DefaultState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients that ranks exchange as int8, and sum in float32.

    Each rank sends to each other rank the slice of that rank, encoded once, with a
    scale in float32 per 128 elements. Of ``n`` elements per slice, ``world_size * (n +
    n / 32)`` bytes are sent, each term rounded up to 16 bytes. Source: ZeRO++ (Wang
    et al., arXiv:2306.10209, section 3.3), without its second level within nodes.

    Args:
        state: the process group, whose ranks are those of the shard group.
        grad, output: as in ``fp16_compress_hook``.

    Collective: one all-to-all over the process group of ``state``; without ``output``
        also one all-gather in the dtype of ``grad``.
    """
    ranks, group = state.world_size, state.process_group
    # Slices and blocks of equal sizes: the tail is filled up with zeros.
    numel = -(-grad.numel() // ranks)
    size = -(-numel // INT8_BLOCK) * INT8_BLOCK
    values = grad.new_zeros(ranks, size)
    if numel * ranks == grad.numel():
        values[:, :numel].copy_(grad.view(ranks, numel))
    else:
        # The slices of the last rank are shorter: cut the padded buffer instead.
        numel = size
        values.view(-1)[: grad.numel()].copy_(grad)
    sent = grad.new_empty(ranks, int8_nbytes(size, INT8_BLOCK), dtype=torch.uint8)
    encode_int8(values, sent, INT8_BLOCK)
    del values
    # Gradients of a rank's slice come from all ranks; the sum over them stays exact in
    # float32, whatever the number of ranks.
    received = torch.empty_like(sent)
    each = [sent.shape[1]] * ranks
    collectives.all_to_all(received.view(-1), sent.view(-1), (each, each), group)
    decoded = torch.empty(ranks, size, device=grad.device)
    decode_int8(received, decoded, INT8_BLOCK)
    mean = decoded.sum(0).div_(ranks)[:numel]
    if output is not None:
        output.copy_(mean)
        return
    parts = grad.new_empty(ranks * numel)
    collectives.all_gather_flat([parts], [mean.to(grad.dtype)], group)
    grad.copy_(parts[: grad.numel()])


def reduce_by_hook(handle: FlatParamHandle) -> None:
    """Have the communication hook of the user reduce every region."""
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
