"""Gradients of sharded parameters that have a graph of their own.

``torch.autograd.grad(loss, parameters, create_graph=True)``: Hessian-vector products,
penalties on gradients, inner loops of meta-learning. The engine captures the full
gradients with their graph; averaging them over ranks and cutting them is one more
linear operation, whose transpose is an all-gather::

    forward    full gradients g_r of rank r   --reduce-scatter-->   shard of sum g_r / n
    backward   v, all of it, on every rank    <--all-gather--       shard of v

A scalar that a rank makes of its shards is that rank's part of a sum over ranks, as the
dot product of sharded vectors is: ranks send nothing to add it up. The average over
ranks is taken where the second backward reduces, so it is left out of the transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composable_fsdp.comm import collectives
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.runtime.backward import UnitForward, pre_next_backward
from composable_fsdp.tree.state import ForwardRecord, RuntimeContext, _FSDPState

Captured = Mapping[int, Tensor]
"""Gradients of full leaves with their graph, by index among a unit's leaves."""


def capture(handles: Sequence[FlatParamHandle], run: Callable[[], Any]) -> Any:
    """Call ``run``, a backward that captures gradients of full leaves.

    None of those arrives, so the units expect none. Collective: the gathers of the
    backward, no reduction.
    """
    contexts = {id(c): c for c in map(_context, handles)}.values()
    for context in contexts:
        context.captures = True
    try:
        return run()
    finally:
        for context in contexts:
            context.captures = False


def _state(handle: FlatParamHandle) -> _FSDPState:
    state: _FSDPState = handle.trainable[0].owner()
    return state


def _context(handle: FlatParamHandle) -> RuntimeContext:
    context = _state(handle).context
    assert context is not None
    return context


def reduced(handle: FlatParamHandle, captured: Captured) -> dict[int, Tensor]:
    """This rank's parts of the averages over ranks of ``captured``, with a graph.

    Collective: per region with a gradient one reduce-scatter over the shard group and
    one all-reduce over the replicate group; in a backward through the result one
    all-gather.
    """
    call = UnitForward(_state(handle), ForwardRecord())
    hook = partial(pre_next_backward, call)
    found: dict[int, Tensor] = {}
    first = 0
    for region in handle.regions:
        indices = range(first, first + len(region.leaves))
        first = indices.stop
        own = [captured.get(index) for index in indices]
        if all(gradient is None for gradient in own):
            continue
        for gradient in own:
            if gradient is not None and gradient.grad_fn is not None:
                # Its graph reads the unit's weights.
                gradient.grad_fn.register_prehook(hook)
        shard = _average(_joined(region, own), handle, region)
        _, cuts, shapes = region.layout.shard_cuts(region.rank, rows=handle.rows)
        pieces = shard.split_with_sizes(cuts.sizes)
        for index, gradient, at, shape in zip(
            indices, own, cuts.parameters, shapes, strict=True
        ):
            if gradient is not None:
                found[index] = pieces[at].reshape(shape).to(region.grad_dtype)
    return found


def _joined(region: FlatParameter, gradients: Sequence[Tensor | None]) -> Tensor:
    """``(padded_numel,)`` in the reduce dtype; zeros where there is no gradient."""
    assert region.reduce_buffer is not None
    dtype, device = region.reduce_buffer.dtype, region.device
    cuts = region.layout.cuts
    pieces = [torch.zeros(size, dtype=dtype, device=device) for size in cuts.sizes]
    for at, gradient in zip(cuts.parameters, gradients, strict=True):
        if gradient is not None:
            pieces[at] = gradient.reshape(-1).to(dtype)
    return torch.cat(pieces)


class _Average(torch.autograd.Function):
    """A unit's reduction as an operation; see above for its transpose."""

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, handle: FlatParamHandle, region: FlatParameter
    ) -> Tensor:
        """From ``(padded_numel,)`` of each rank to ``(shard_numel,)`` of the mean."""
        ctx.handle, ctx.region = handle, region
        groups = handle.groups
        before, after, average = region.division
        full = full / before
        shard = full.new_empty(region.layout.shard_numel)
        if groups.shard is None:
            shard.copy_(full)
        else:
            collectives.reduce_scatter_flat(
                [shard], [full], groups.shard, average=average
            )
        if groups.replicate is not None and groups.replicas > 1:
            collectives.all_reduce(shard, groups.replicate, average=average)
        return shard.div_(after)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """From ``(shard_numel,)`` of each rank to ``(padded_numel,)``."""
        shard, group = gradients[0].contiguous(), ctx.handle.groups.shard
        if group is None:
            return shard, None, None
        full = shard.new_empty(ctx.region.layout.padded_numel)
        collectives.all_gather_flat([full], [shard], group)
        return full, None, None


_average: Any = _Average.apply  # untyped in torch
