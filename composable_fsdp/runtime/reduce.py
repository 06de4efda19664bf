"""From gradients in the reduce buffers to ``.grad`` of the sharded leaves.

One reduction is in flight at a time: the next one first finishes it. On CPU that waits
for the ``Work``, on CUDA the compute stream waits for the reduce stream::

    compute [.. k+1 ..]--event   [.. k ..]   [wait done(k+1); divide, add, free] ..
    reduce             [reduce-scatter k+1]--event done(k+1)

A buffer gets memory when the one before was freed, so one is alive, unless gradients of
``no_sync`` wait in others. The compute stream allocates it, and it is freed behind the
wait of that stream. ``.grad`` is touched on the compute stream alone, as autograd,
optimizers and users do: the reduce stream writes what no leaf shows. It also sends
offloaded gradients to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import Streams, Waitable
from composable_fsdp.flat import memory, views
from composable_fsdp.flat.gradients import (
    add_to_all,
    add_to_each,
    note_shown,
    own_gradients,
    ready_gradient,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.runtime.comm_hooks import call_comm_hook
from composable_fsdp.runtime.offload import drop_d2h_grad_copies, start_d2h_grad_copies
from composable_fsdp.runtime.user_hooks import (
    call_post_hooks,
    call_tensor_hooks,
    hooked_leaves,
    show_flat_gradient,
    tensor_hooks_of,
)
from composable_fsdp.tree.order_logs import enter_backward_use
from composable_fsdp.tree.state import Reduction, RuntimeContext


def copy_grads_to_reduce_buffers(
    context: RuntimeContext, handle: FlatParamHandle
) -> None:
    """Move gradients that wait into the reduce buffers, all in one operation.

    The buffers are given memory, if they have none to write to, on the current stream.
    Sends nothing.
    """
    if torch.is_grad_enabled():
        # create_graph. As a decorator this would take 2.5 us in every step.
        with torch.no_grad():
            copy_grads_to_reduce_buffers(context, handle)
        return
    if context.reducing is not None and context.reducing.handle is handle:
        finish_reduction(context)
    users = [] if context.streams is None else _users(context.streams, handle)
    for stream in users[1:]:
        users[0].wait_stream(stream)
    if not handle.reduce_has_memory:
        views.allocate_reduce(handle)
        handle.reduce_owner = users[0] if users else None
    for region in handle.trainable:
        gradients = [gradient for gradient in region.waiting if gradient is not None]
        if gradients:
            into = region.reduce_views
            if len(gradients) < len(into):
                into = tuple(compress(into, [g is not None for g in region.waiting]))
            torch._foreach_copy_(into, gradients)
        del gradients
    for stream in users[1:]:
        stream.wait_stream(users[0])
    # Not before: one made on a stream of its own is given back behind the stream of
    # the hooks, for which the engine noted it, and that has to be behind the copy.
    for region in handle.trainable:
        region.waiting[:] = [None] * len(region.waiting)


def reduce_gradients(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Average the arrived gradients over ranks and give each leaf its part.

    Reads the reduce buffers ``(padded_numel,)``; the sharded leaves' ``.grad`` become
    views of ``grad_shard`` ``(shard_numel,)``, added to what is there. Gradients that
    did not arrive on this rank count as zeros and leave ``.grad`` as it was, unless the
    unit's rule says that all take part. An offloaded unit's ``.grad`` is None until
    ``finish_d2h_grad_copies``.

    Collective: one reduce-scatter per reduce dtype (regions coalesced) over the shard
    group, then one all-reduce per region over the replicate group, unless the rule
    leaves it for later; those of one rank are left out. With a communication hook, what
    that sends.
    Raises: DesyncError, if another rank reduces something else, or other parameters.
    """
    finish_reduction(context)
    copy_grads_to_reduce_buffers(context, handle)
    views.zero_missing(handle)
    final = handle.rule.all_reduce or handle.groups.replicas == 1
    arrived = views.arrived_flags(handle)
    log = handle.reduce_log
    try:
        if log is not None:
            if log.expected[log.position] == (handle, handle.epoch, arrived):
                log.position += 1
            else:
                enter_backward_use(context, log, (handle, handle.epoch, arrived))
    finally:
        # Not before: until then the log tells peers which gradients are not there.
        views.clear_arrived(handle)
        handle.held = None
    handle.reduce_due = False
    for region in handle.trainable:
        ready_gradient(region, rows=handle.rows)
    reduction = Reduction(handle, [], arrived, final=final)
    context.reducing = reduction
    if context.streams is not None:
        _reduce_on_stream(context.streams, reduction)
        return
    _choose_targets(handle, final=final)
    reduction.works = _issue(handle, final=final, async_op=True)
    if not reduction.works:
        finish_reduction(context)


def _reduce_on_stream(streams: Streams, reduction: Reduction) -> None:
    handle = reduction.handle
    for stream in _users(streams, handle):
        streams.reduce.wait_stream(stream)
    with torch.cuda.stream(streams.reduce):
        # Targets made here belong to the reduce stream, which waits, as above, before
        # it allocates again.
        _choose_targets(handle, final=reduction.final)
        _issue(handle, final=reduction.final, async_op=False)
        assert handle.reduce_event is not None
        # Whoever waits to free the buffers need not wait for copies to the host; but
        # the result of a hook may be such a buffer.
        if handle.rule.hook is None:
            handle.reduce_event.record(streams.reduce)
        if handle.offload:
            _apply_reduced_gradients(reduction)
        if handle.rule.hook is not None:
            handle.reduce_event.record(streams.reduce)


def _users(streams: Streams, handle: FlatParamHandle) -> list[torch.cuda.Stream]:
    """The streams that write reduce buffers and ``.grad``, the current one first.

    Nearly always they are one. Hooks of leaves run on the stream of build, others on
    that of the forward they follow, the end of backward on the caller's.
    """
    found = [torch.cuda.current_stream(handle.device)]
    for stream in (streams.compute, handle.leaf_stream, handle.reduce_owner):
        if stream is not None and stream not in found:
            found.append(stream)
    return found


def finish_reduction(context: RuntimeContext) -> None:
    """Wait for the reduction in flight, if any, and free its buffers. Sends nothing.

    Divides, adds, sets ``.grad`` and calls the leaves' hooks, on the current stream. Of
    an offloaded unit on CUDA the reduce stream has done its part,
    ``finish_d2h_grad_copies`` does the rest.
    """
    reduction = context.reducing
    if reduction is None:
        return
    context.reducing = None
    handle, streams = reduction.handle, context.streams
    if streams is None:
        for work in reduction.works:
            work.wait()
        if (
            reduction.final
            and handle.groups.replicas > 1
            and handle.groups.shard_world_size > 1
            and handle.rule.hook is None
        ):
            _replicate(handle)
        _apply_reduced_gradients(reduction)
    else:
        current, *others = _users(streams, handle)
        for stream in others:
            current.wait_stream(stream)
        assert handle.reduce_event is not None
        handle.reduce_event.wait()
        if not handle.offload:
            _apply_reduced_gradients(reduction)
        for stream in others:
            stream.wait_stream(current)
    for region in handle.trainable:
        region.temporary = None
    views.free_reduce(handle)


def drop_reduction(context: RuntimeContext) -> None:
    """Wait for the reduction in flight, if any, and forget its sums. Sends nothing.

    So are gradients on their way to the host.
    """
    drop_d2h_grad_copies(context)
    reduction = context.reducing
    if reduction is None:
        return
    context.reducing = None
    handle = reduction.handle
    for work in reduction.works:
        work.wait()
    if context.streams is not None:
        # Not for the event: if a hook raised, this reduction has not recorded it.
        for stream in _users(context.streams, handle):
            stream.wait_stream(context.streams.reduce)
    for region in handle.trainable:
        region.temporary = None
    views.free_reduce(handle)


def drop_unreduced_grads(handle: FlatParamHandle) -> None:
    """Forget gradients that arrived and were not reduced to the end. Sends nothing."""
    views.clear_arrived(handle)
    handle.held = None
    for region in handle.trainable:
        region.partial = None
        region.waiting[:] = [None] * len(region.waiting)
    handle.reduce_due = False
    if handle.reduce_has_memory:
        if handle.reduce_owner is not None and handle.leaf_stream is not None:
            # Gradients may still be copied into the buffers.
            handle.reduce_owner.wait_stream(handle.leaf_stream)
        views.free_reduce(handle)


def _choose_targets(handle: FlatParamHandle, *, final: bool) -> None:
    """Decide where the sums go: into ``grad_shard`` if no leaf has a gradient yet.

    And if it is on the device, in the dtype of the sums.
    """
    whole = final and handle.rule.hook is None
    for region in handle.trainable:
        assert region.reduce_buffer is not None
        dtype = region.reduce_buffer.dtype
        direct = whole and dtype == region.grad_dtype and not region.offload
        region.has_tensor_hooks = False
        if region.flat is not None:
            direct = direct and region.flat.grad is None
            region.has_tensor_hooks = any(map(tensor_hooks_of, region.leaves))
        else:
            for leaf in region.leaves:
                if leaf.grad is not None:
                    direct = False
                if leaf._backward_hooks:
                    region.has_tensor_hooks = True
        region.temporary = None
        if not direct:
            region.temporary = memory.new_buffer(
                region.layout.shard_numel, dtype, region.device
            )


def _target(region: FlatParameter) -> Tensor:
    target = region.temporary if region.temporary is not None else region.grad_shard
    assert target is not None
    return target


def _issue(handle: FlatParamHandle, *, final: bool, async_op: bool) -> list[Waitable]:
    """Send the reductions; without a group, copy. Returns what to wait for."""
    groups, rule = handle.groups, handle.rule
    works: list[torch.distributed.Work | None] = []
    for regions in handle.reduce_groups:
        if rule.hook is not None and final:
            call_comm_hook(rule, regions)
            continue
        # One dtype, so one division.
        before, _, average = regions[0].division
        buffers = [r.reduce_buffer for r in regions if r.reduce_buffer is not None]
        targets = [_target(r) for r in regions]
        if before != 1 and rule.hook is None:
            torch._foreach_div_(buffers, before)
        if groups.shard is not None:
            works.append(
                collectives.reduce_scatter_flat(
                    targets, buffers, groups.shard, average=average, async_op=async_op
                )
            )
            if final and groups.replicas > 1 and not async_op:
                _replicate(handle, regions)
            continue
        for region, target, buffer in zip(regions, targets, buffers, strict=True):
            target.copy_(buffer)
            if final and groups.replicate is not None:
                _add_partial(region)
                works.append(
                    collectives.all_reduce(
                        target, groups.replicate, average=average, async_op=async_op
                    )
                )
    return [work for work in works if work is not None]


def _add_partial(region: FlatParameter) -> None:
    """Add sums that waited for the replicas to the ones that go to them now."""
    if region.partial is not None:
        _target(region).add_(region.partial)
        region.partial = None


def _replicate(
    handle: FlatParamHandle, regions: Sequence[FlatParameter] | None = None
) -> None:
    """Add the replicas' sums: one all-reduce per region, after the reduce-scatter."""
    group = handle.groups.replicate
    assert group is not None
    chosen = regions or [r for group_ in handle.reduce_groups for r in group_]
    for region in chosen:
        _add_partial(region)
        average = region.division.by_backend
        collectives.all_reduce(_target(region), group, average=average)


def _apply_reduced_gradients(reduction: Reduction) -> None:
    """Divide, add to earlier gradients, set ``.grad`` of the leaves that got one.

    Calls the user's hooks on those leaves.
    """
    handle = reduction.handle
    if not reduction.final:
        _hold_partial_sums(reduction)
        return
    by_hook = handle.rule.hook is not None
    hooked: list[nn.Parameter] = []
    for region, arrived in zip(handle.trainable, reduction.arrived, strict=True):
        target = _target(region)
        divisor = region.division.after
        if divisor != 1 and target.numel() and not by_hook:
            target.div_(divisor)
        if region.has_tensor_hooks:
            call_tensor_hooks(region, target, arrived, rows=handle.rows)
        if region.offload:
            start_d2h_grad_copies(region, target, arrived, rows=handle.rows)
            continue
        if region.temporary is not None:
            if region.flat is not None:
                own_gradients(region, rows=handle.rows)
                assert region.grad_shard is not None
                region.grad_shard.add_(region.temporary)
            elif not add_to_all(region, region.temporary, arrived):
                add_to_each(region, region.temporary, arrived, rows=handle.rows)
                hooked += hooked_leaves(region, arrived)
                continue
        if region.flat is not None:
            show_flat_gradient(region, arrived)
            continue
        if region.temporary is None:
            region.shown = arrived  # of a gradient that was made for this
        elif region.shown != arrived:
            note_shown(region, arrived)
        for leaf, view, hit in zip(
            region.leaves, region.grad_views, arrived, strict=True
        ):
            if hit:
                meanwhile = leaf.grad
                if meanwhile is not None and meanwhile is not view is not None:
                    # The loss used the sharded parameter itself, beside its unit.
                    view.add_(meanwhile)
                leaf.grad = view
                if leaf._post_accumulate_grad_hooks:
                    hooked.append(leaf)
    if hooked:
        call_post_hooks(hooked)


def _hold_partial_sums(reduction: Reduction) -> None:
    """Keep sums over the shard group until the replicas' are asked for."""
    handle = reduction.handle
    handle.held = reduction.arrived
    for region in handle.trainable:
        sums, region.temporary = region.temporary, None
        if region.partial is not None and sums is not None:
            region.partial.add_(sums)
        else:
            region.partial = sums
