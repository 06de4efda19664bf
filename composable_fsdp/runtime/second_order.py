"""Gradients of sharded parameters with a graph (``create_graph=True``).

``torch.autograd.grad(loss, parameters, create_graph=True)`` serves Hessian-vector
products, penalties on gradients and inner loops of meta-learning. The engine captures
the full gradients with their graph. The reduction over ranks is a linear operation,
whose transpose is an all-gather::

    forward    full gradients g_r of rank r   --reduce-scatter-->   shard of sum g_r / n
    backward   v, all of it, on every rank    <--all-gather--       shard of v

A scalar that a rank computes from shards, such as the dot product of sharded vectors,
is that rank's term of a sum over ranks. No collective adds the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composable_fsdp.comm import collectives
from composable_fsdp.comm.sequence import Operation
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.runtime.backward import (
    GradientOrder,
    UnitForward,
    pre_next_backward,
)
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

Captured = Mapping[int, Tensor]
"""Gradients of full parameters with their graph, by index in the unit."""


def capture(handles: Sequence[FlatParamHandle], run: Callable[[], Any]) -> Any:
    """Call ``run``, a backward that captures gradients of full parameters.

    The AccumulateGrad nodes do not run, so the units expect no gradients.

    Collective: the all-gathers of the backward; no reduction.
    """
    contexts = {id(c): c for c in map(_context, handles)}.values()
    for context in contexts:
        # ``begin_unit_backward`` then counts no gradients of the unit.
        context.captures = True
    try:
        return run()
    finally:
        for context in contexts:
            context.captures = False


def _state(handle: FlatParamHandle) -> _FSDPState:
    """Return the state of the unit."""
    state: _FSDPState = handle.layout.trainable[0].reduce.owner()
    return state


def _context(handle: FlatParamHandle) -> RuntimeContext:
    """Return the context of the unit's tree."""
    context = _state(handle).context
    assert context is not None
    return context


def reduced(handle: FlatParamHandle, captured: Captured) -> dict[int, Tensor]:
    """Return this rank's parts of the averages of ``captured``, with a graph.

    Collective: per region with a gradient, a reduce-scatter over the shard group and an
        all-reduce over the replicate group; in a backward through the result, an
        all-gather over the shard group.
    """
    call = UnitForward(_state(handle), GradientOrder())
    hook = partial(pre_next_backward, call)
    found: dict[int, Tensor] = {}
    first = 0
    for region in handle.layout.regions:
        indices = range(first, first + len(region.leaves))
        first = indices.stop
        own = [captured.get(index) for index in indices]
        if not isinstance(region, TrainableRegion) or not any(
            gradient is not None for gradient in own
        ):
            continue
        for gradient in own:
            if gradient is not None and gradient.grad_fn is not None:
                # A backward through this gradient reads the parameters of the unit.
                gradient.grad_fn.register_prehook(hook)
        shard = _average(_joined(region, own), handle, region)
        _, cuts, shapes, _ = region.cuts
        pieces = shard.split_with_sizes(cuts.sizes)
        for index, gradient, at, shape in zip(
            indices, own, cuts.parameters, shapes, strict=True
        ):
            if gradient is not None:
                # ``grad_dtype`` is the dtype of ``.grad``; the cast is part of the
                # graph.
                found[index] = pieces[at].reshape(shape).to(region.gradient.dtype)
    return found


def _joined(region: TrainableRegion, gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a buffer ``(padded_numel,)`` in the reduce dtype; zeros for None."""
    dtype, device = region.reduce.buffer.dtype, region.device
    cuts = region.layout.cuts
    pieces = [torch.zeros(size, dtype=dtype, device=device) for size in cuts.sizes]
    # ``torch.cat`` of the pieces, padding included, keeps the graph of each gradient.
    for at, gradient in zip(cuts.parameters, gradients, strict=True):
        if gradient is not None:
            pieces[at] = gradient.reshape(-1).to(dtype)
    return torch.cat(pieces)


class _Average(torch.autograd.Function):
    """The reduction of a region as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, handle: FlatParamHandle, region: TrainableRegion
    ) -> Tensor:
        """Reduce ``(padded_numel,)`` per rank to ``(shard_numel,)`` of the average.

        Args:
            ctx: the context of the autograd function.
            full: the full gradients of this rank, in the reduce dtype.
            handle: the handle of the unit.
            region: the region of the gradients.

        Returns: this rank's part of the average.
        Collective: a reduce-scatter over the shard group, then an all-reduce over the
            replicate group; none over a group of a single rank.
        """
        ctx.handle, ctx.region = handle, region
        groups, rule = handle.groups, handle.rule
        before, after, average = region.reduce.division
        # Not in place: ``full`` is an input of the function.
        full = full / before
        shard = full.new_empty(region.layout.shard_numel)
        if (ref := rule.group or groups.shard_ref) is None:
            shard.copy_(full)
        else:
            scatter = rule.reduce_scatter or collectives.reduce_scatter_flat
            operation = Operation(
                ref.operations, "reduce_scatter", handle.full_fqn, handle.phase, full
            )
            scatter(
                [shard],
                [full],
                ref.get(),
                average=average,
                overwrite=True,
                operation=operation,
            )
        if groups.replicate is not None and groups.replicas > 1:
            collectives.all_reduce(shard, groups.replicate, average=average)
        return shard.div_(after)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """All-gather ``(shard_numel,)`` of each rank into ``(padded_numel,)``."""
        shard, group = gradients[0].contiguous(), ctx.handle.groups.shard
        if group is None:
            return shard, None, None
        # No division here: the reduction of the second backward divides.
        full = shard.new_empty(ctx.region.layout.padded_numel)
        collectives.all_gather_flat([full], [shard], group)
        return full, None, None


_average: Any = _Average.apply  # untyped in torch
