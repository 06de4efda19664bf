"""Reduction of gradients: from the reduce buffers to ``.grad`` of sharded parameters.

A rank has one reduction in flight, and the next finishes it first; a hybrid unit's
all-reduce, on a stream and a communicator of its own, may outlast the next one. Reduce
and full buffers use the same memory by turns, which the gather stream allocates and
frees. On CPU the host waits for the reduction, on CUDA for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import Streams, Waitable
from composable_fsdp.comm.operations import Operation
from composable_fsdp.flat import memory
from composable_fsdp.flat.gradients import (
    allocate_reduce,
    are_cleared,
    arrived_flags,
    call_post_hooks,
    call_tensor_hooks,
    clear_arrived,
    free_reduce,
    leave_reduce,
    ready_gradient,
    reduce_target,
    show_on_leaves,
    zero_missing,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import TrainableRegion, divisor_of
from composable_fsdp.runtime.offload import drop_d2h_grad_copies, start_d2h_grad_copies
from composable_fsdp.tree import moments
from composable_fsdp.tree.state import Reduction, RuntimeContext


def copy_grads_to_reduce_buffers(
    context: RuntimeContext, handle: FlatParamHandle
) -> None:
    """Copy the waiting gradients of the unit into the reduce buffers."""
    if torch.is_grad_enabled():
        # With ``create_graph`` gradients are enabled here. ``no_grad`` as a decorator
        # would take 2.5 us in every step.
        with torch.no_grad():
            copy_grads_to_reduce_buffers(context, handle)
        return
    if context.reducing is not None and context.reducing.handle is handle:
        # The reduction in flight reads the reduce buffers, so finish before writing.
        finish_reduction(context)
    streams = context.streams
    owner: Any = None  # of the copy, on CUDA
    others: list[torch.cuda.Stream] = []
    if not streams.host_waits:
        owner, *others = streams.gradient_streams(handle.events)
    for stream in others:
        owner.wait_stream(stream)
    if not handle.reduction.has_memory:
        if owner is None:
            allocate_reduce(handle, None)
        else:
            with streams.on(streams.gather):
                allocate_reduce(handle, owner)
            # The last user of the memory, a reduction or the compute of a full unit,
            # is one that the gather stream has waited for.
            owner.wait_stream(streams.gather)
    for region in handle.layout.trainable:
        waiting = region.reduce.waiting
        gradients = [gradient for gradient in waiting if gradient is not None]
        if gradients:
            into = region.reduce.views
            if len(gradients) < len(into):
                into = tuple(compress(into, [g is not None for g in waiting]))
            torch._foreach_copy_(into, gradients)
        del gradients
    for stream in others:
        stream.wait_stream(owner)
    # Drop the gradients only now. Memory of a gradient that was made on another stream
    # is returned behind the hooks' stream, which the engine recorded as a user of the
    # memory. The hooks' stream is behind the copy only after the wait above.
    for region in handle.layout.trainable:
        region.reduce.waiting[:] = [None] * len(region.reduce.waiting)


def reduce_gradients(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Average the arrived gradients over the ranks and give each parameter its part.

    Raises: DesyncError, if another rank reduces another unit or other parameters.
    Collective: one reduce-scatter per reduce dtype over the shard group, then one
        all-reduce over the replicate group; or those of the communication hook.
    """
    finish_reduction(context, ahead_of=handle)
    copy_grads_to_reduce_buffers(context, handle)
    # Missing gradients count as zeros. The padding is zeroed, too, because the buffer
    # is uninitialized memory.
    zero_missing(handle)
    final = handle.rule.all_reduce or handle.groups.sum_ref is None
    arrived = arrived_flags(handle)
    log, use = handle.logs.reduce, (handle, handle.layout.structure, arrived)
    try:
        if log is not None:
            if log.expected[log.position] == use:
                log.position += 1
            else:
                context.enter_backward_use(log, use)
    finally:
        # Clear only now: the order log tells other ranks which gradients have not
        # arrived.
        clear_arrived(handle)
        handle.reduction.held = None
    handle.reduction.due = False
    if final:
        handle.writes.steps += handle.writes.steps_per_reduction
    reduction = Reduction(handle, [], arrived, final=final)
    context.reducing, handle.reduction.in_flight = reduction, True
    if not context.streams.host_waits:
        _reduce_on_stream(context.streams, reduction)
        return
    for region in handle.layout.trainable:
        ready_gradient(region)
    _choose_targets(handle, final=final)
    try:
        _issue(reduction, async_op=True)
    except BaseException:
        # As of an all-gather (``runtime.unshard``).
        leave_reduce(handle)
        raise
    # No work to wait for: all groups have a single rank, or a hook has reduced already.
    if not reduction.works:
        finish_reduction(context)


def _reduce_on_stream(streams: Streams, reduction: Reduction) -> None:
    """Issue the reduction on the reduce stream, behind the streams of the gradients."""
    handle = reduction.handle
    users = streams.gradient_streams(handle.events)
    if users[0] == streams.compute:
        for region in handle.layout.trainable:
            ready_gradient(region)
    else:
        # The hook of a leaf may run on another stream, whose pool of memory serves
        # program code that does not wait for readers of ``.grad``.
        with streams.on(streams.compute):
            for region in handle.layout.trainable:
                ready_gradient(region)
    for stream in users:
        streams.reduce.wait_stream(stream)
    groups, by_hook = handle.groups, handle.rule.hook is not None
    shard, sums = handle.rule.group or groups.scatter_ref, groups.sum_ref
    handle.reduction.all_reduces = bool(
        reduction.final and shard and sums and not by_hook
    )
    with streams.on(streams.reduce):
        # Targets that are allocated here belong to the reduce stream, which waits for
        # the other streams (as above) before the next allocation.
        _choose_targets(handle, final=reduction.final)
        _issue(reduction, async_op=False)
        # The wait before the buffers are freed need not include the copies to the host.
        # The result of a communication hook, however, may be a reduce buffer, which the
        # copies read.
        if not by_hook:
            handle.events.reduce.record(streams.reduce)
        if handle.layout.offload and not handle.reduction.all_reduces:
            _apply_reduced_gradients(reduction)
        if by_hook:
            handle.events.reduce.record(streams.reduce)
    # Without a reduction over the group (a hook sends its own collectives), the
    # event is later than the last operation: known to have ended too late.
    if shard is not None:
        shard.marks[handle.events.reduce.event] = shard.number
    if sums is not None:
        event = handle.events.reduce
        if handle.reduction.all_reduces:
            _all_reduce_on_stream(streams, reduction)
            event = handle.events.all_reduce
        sums.marks[event.event] = sums.number


def _all_reduce_on_stream(streams: Streams, reduction: Reduction) -> None:
    """Issue the all-reduces over the sum group, behind the reduce-scatters alone."""
    handle = reduction.handle
    with streams.on(streams.all_reduce):
        # Not ``wait_stream``: the reduce stream may have been given more by then.
        handle.events.reduce.wait()
        all_reduce_sums(handle)
        if handle.layout.offload:
            _apply_reduced_gradients(reduction)
        handle.events.all_reduce.record(streams.all_reduce)


def finish_reduction(
    context: RuntimeContext, *, ahead_of: FlatParamHandle | None = None
) -> None:
    """Wait for the reductions in flight, free the reduce buffers, and set ``.grad``.

    On CUDA an all-reduce stays in flight if another unit, ``ahead_of``, sends next.
    Collective: on CPU one all-reduce per reduce dtype over the sum group, if any.
    """
    if context.all_reducing is not None:
        _finish_all_reduce(context, context.all_reducing)
    reduction = context.reducing
    if reduction is None:
        return
    context.reducing = None
    handle, streams = reduction.handle, context.streams
    handle.reduction.in_flight = handle.reduction.all_reduces
    if streams.host_waits:
        try:
            for work in reduction.works:
                work.wait()
            if (
                reduction.final
                and handle.groups.sum_ref is not None
                and handle.groups.scatter_ref is not None
                and handle.rule.hook is None
            ):
                all_reduce_sums(handle)
        # Also after Ctrl-C, while the reduction goes on.
        except BaseException:
            leave_reduce(handle)
            raise
        _apply_reduced_gradients(reduction)
    else:
        # The side streams write buffers that no parameter shows.
        applies = not handle.layout.offload and not handle.reduction.all_reduces
        _wait_on_streams(streams, reduction, handle.events.reduce, applies=applies)
    if handle.reduction.has_memory:
        _free_buffers(streams, reduction)
    if not handle.reduction.all_reduces:
        _forget_outputs(handle)
        return
    context.all_reducing = reduction
    # A second reduction of the unit would write into the same outputs.
    if ahead_of is None or ahead_of is handle:
        _finish_all_reduce(context, reduction)


def _free_buffers(streams: Streams, reduction: Reduction) -> None:
    """Free the reduce buffers of a reduction that the current stream waits for."""
    if not streams.host_waits:
        # Behind the reduction alone: the next all-gather need not wait for compute.
        with streams.on(streams.gather):
            free_behind_reduction(reduction)
        if not reduction.handle.reduction.has_memory:
            return
        streams.gather.wait_stream(streams.current())
    free_reduce(reduction.handle)


def free_behind_reduction(reduction: Reduction) -> None:
    """Free the reduce buffers on the current stream, which waits for the reduction."""
    handle = reduction.handle
    # The result of a communication hook may be a reduce buffer, which is read later.
    if handle.reduction.has_memory and handle.rule.hook is None:
        handle.events.reduce.wait()
        free_reduce(handle)


def _wait_on_streams(
    streams: Streams, reduction: Reduction, event: Waitable, *, applies: bool
) -> None:
    """Have the current stream wait for ``event``, and set ``.grad`` if asked."""
    # Autograd, optimizers and users access ``.grad`` on the compute stream, so only
    # that stream writes ``.grad``.
    current, *others = streams.gradient_streams(reduction.handle.events)
    for stream in others:
        current.wait_stream(stream)
    event.wait()
    if applies:
        _apply_reduced_gradients(reduction)
    for stream in others:
        stream.wait_stream(current)


def _finish_all_reduce(context: RuntimeContext, reduction: Reduction) -> None:
    """Wait for the all-reduces on their stream; set ``.grad`` on the current stream."""
    handle, streams = reduction.handle, context.streams
    context.all_reducing = None
    try:
        if handle.layout.offload:
            # Compute reads nothing. Outputs are given back to the reduce stream below.
            with streams.on(streams.reduce):
                handle.events.all_reduce.wait()
        else:
            event = handle.events.all_reduce
            _wait_on_streams(streams, reduction, event, applies=True)
    # Also if a hook of the user raised: ``drop_reduction`` does not know this one.
    finally:
        _forget_outputs(handle)


def _forget_outputs(handle: FlatParamHandle) -> None:
    """Give up the outputs of a reduction whose end all readers wait for."""
    handle.reduction.all_reduces = handle.reduction.in_flight = False
    for region in handle.layout.trainable:
        region.reduce.temporary = None


def drop_reduction(context: RuntimeContext) -> None:
    """Wait for the reductions in flight, if any, and discard the sums."""
    drop_d2h_grad_copies(context)
    dropped = [context.all_reducing, context.reducing]
    context.all_reducing = context.reducing = None
    for reduction in filter(None, dropped):
        handle = reduction.handle
        try:
            for work in reduction.works:
                work.wait()
        except BaseException:
            leave_reduce(handle)
            raise
        # Wait for the streams and not for events: if a hook raised, the event has not
        # been recorded for this reduction.
        if not context.streams.host_waits:
            streams = context.streams
            for stream in (*streams.gradient_streams(handle.events), streams.gather):
                stream.wait_stream(streams.reduce)
                stream.wait_stream(streams.all_reduce)
        _forget_outputs(handle)
        if handle.reduction.has_memory:
            free_reduce(handle)


def drop_unreduced_grads(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Discard gradients that have arrived and were not fully reduced."""
    clear_arrived(handle)
    handle.reduction.held = None
    for region in handle.layout.trainable:
        region.reduce.partial = None
        region.reduce.waiting[:] = [None] * len(region.reduce.waiting)
    handle.reduction.due = False
    if handle.reduction.has_memory:
        # Kernels may still copy gradients into the reduce buffers.
        for stream in context.streams.gradient_streams(handle.events):
            context.streams.gather.wait_stream(stream)
        free_reduce(handle)


def _choose_targets(handle: FlatParamHandle, *, final: bool) -> None:
    """Choose the output of each reduction: ``gradient.shard`` or a temporary buffer."""
    # The output of some placements holds shards of other ranks, too, which ``.grad``
    # would keep.
    shards = handle.groups.reduced_shards
    whole = final and handle.rule.hook is None and shards == 1
    for region in handle.layout.trainable:
        reduce = region.reduce
        dtype = reduce.buffer.dtype
        direct = whole and dtype == region.gradient.dtype and not region.offload
        hooks = [leaf._backward_hooks for leaf in region.leaves]
        reduce.has_tensor_hooks = any(hooks)
        reduce.temporary = None
        if not (direct and are_cleared(region.holders)):
            reduce.temporary = memory.new_buffer(
                shards * region.layout.shard_numel, dtype, region.device
            )


def _issue(reduction: Reduction, *, async_op: bool) -> None:
    """Issue the reduce-scatters; on CUDA (not ``async_op``) also the all-reduces."""
    # Works to wait for are noted at once: a later collective may raise.
    handle, final = reduction.handle, reduction.final
    groups, rule, works = handle.groups, handle.rule, reduction.works
    if rule.hook is not None and final:
        moments.reduce_by_hook(handle)
        return
    for regions in handle.layout.reduce_groups:
        # All regions of a group have the same reduce dtype, hence the same division.
        before, _, average = regions[0].reduce.division
        buffers = [region.reduce.buffer for region in regions]
        targets = list(map(reduce_target, regions))
        if before != 1:
            torch._foreach_div_(buffers, before)
        ref, work = rule.group or groups.scatter_ref, None
        if ref is None:
            torch._foreach_copy_(targets, buffers)
            if final:
                work = issue_all_reduce(handle, regions, async_op=async_op)
        else:
            group = ref.ref() or ref.get()  # ``get`` raises if it was destroyed
            work = collectives.reduce_scatter_flat(
                targets,
                buffers,
                group,
                average=average,
                overwrite=True,
                async_op=async_op,
                operation=Operation(
                    ref,
                    "reduce_scatter",
                    handle.full_fqn,
                    handle.phase,
                    buffers,
                ),
            )
            # On CPU the reduce-scatter is asynchronous, so ``all_reduce_sums`` adds. On
            # CUDA the sums belong to this stream, which must be the last to read them.
            if final and not async_op and groups.sum_ref is not None:
                for region in regions:
                    add_partial_sums(region)
        if work is not None:
            works.append(work)


def add_partial_sums(region: TrainableRegion) -> None:
    """Add sums of earlier reductions that were not yet all-reduced."""
    if region.reduce.partial is not None:
        reduce_target(region).add_(region.reduce.partial)
        region.reduce.partial = None


def all_reduce_sums(handle: FlatParamHandle) -> None:
    """All-reduce the regions over the sum group, after the reduce-scatters."""
    for regions in handle.layout.reduce_groups:
        issue_all_reduce(handle, regions, async_op=False)


def issue_all_reduce(
    handle: FlatParamHandle, regions: Sequence[TrainableRegion], *, async_op: bool
) -> Operation | None:
    """Issue the all-reduce of regions with the same reduce dtype over the sum group."""
    ref = handle.groups.sum_ref
    if ref is None:
        return None
    for region in regions:
        add_partial_sums(region)
    targets = [reduce_target(region) for region in regions]
    return collectives.all_reduce(
        targets,
        ref.get(),
        average=regions[0].reduce.division.by_backend,
        async_op=async_op,
        operation=Operation(ref, "all_reduce", handle.full_fqn, handle.phase, targets),
    )


def _apply_reduced_gradients(reduction: Reduction) -> None:
    """Divide the sums, add earlier gradients, set ``.grad`` and call user hooks."""
    handle = reduction.handle
    if not reduction.final:
        # Until their all-reduce is due.
        handle.reduction.held = reduction.arrived
        for region in handle.layout.trainable:
            add_partial_sums(region)
            region.reduce.partial, region.reduce.temporary = reduce_target(region), None
        return
    hooked: list[nn.Parameter] = []
    shards = handle.groups.reduced_shards
    for region, arrived in zip(handle.layout.trainable, reduction.arrived, strict=True):
        reduce = region.reduce
        target = reduce.temporary  # ``reduce_target``, inlined
        if target is None:
            target = region.gradient.shard
        elif shards > 1:
            own = region.rank % shards
            reduce.temporary = target = target.chunk(shards)[own]
        assert target is not None
        if handle.rule.after_sum is not None:
            handle.rule.after_sum(target)
        divisor = reduce.division.after
        if divisor != 1 and target.numel():
            # Fake tensors take numbers alone.
            plain = type(target) is Tensor
            target.div_(divisor_of(divisor, target.dtype) if plain else divisor)
        if reduce.has_tensor_hooks:
            call_tensor_hooks(region, target, arrived)
        if region.offload:
            start_d2h_grad_copies(region, target, arrived)
        else:
            hooked += show_on_leaves(region, reduce.temporary, arrived)
    if hooked:
        call_post_hooks(hooked)
