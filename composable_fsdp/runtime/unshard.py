"""Unshard and reshard a unit, and manage the memory of the full buffers.

On CUDA each full buffer has one owner, the gather stream, and one event that frees it,
``events.free``, recorded at the reshard on the stream of the last reader::

    gather   [wait free(k-2)] [all-gather k]---event k
    compute  [ ...     k-1    ...          ]  [wait event k] [ ... k ... ]--free(k)

What gives the full parameters up, and what becomes of their memory::

    reshard         the modules show shards; freed (on CUDA later), unless a second
                    backward keeps it, or a parameter that a user kept
    keep_full       the modules show shards; stays, filled, for the next forward
    end_use         ``reshard`` or ``keep_full``, as the unit is set
    release         as ``reshard``; not kept for a second backward
    discard_full    as ``reshard``; the next use gathers again in any case
    drop_unused     ``reshard`` of units that were prefetched in vain

    residency.free_full     the move itself: freed now
    residency.defer_free    freed later by the gather stream, behind the last reader
    residency.move          to SHARDED: nothing is freed; may be written over
    residency.leave_full    left to a collective that failed and may still write

A prefetch reads the next unit from a record that is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import (
    Streams,
    Waitable,
    copy_async,
    wait_unless_captured,
)
from composable_fsdp.comm.groups import GroupRef
from composable_fsdp.comm.operations import Operation
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat import residency
from composable_fsdp.flat.gradients import copy_waiting_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.residency import (
    COPIES_SHOWN,
    FREE_PENDING,
    HIDDEN,
    NOT_GATHERED,
    SHARDED,
    UNSHARDED,
    make_unreadable,
    shard_versions,
)
from composable_fsdp.planning.options import RETIRING_LIMIT, RETIRING_UNLIMITED
from composable_fsdp.runtime.reduce import finish_reduction, free_behind_reduction
from composable_fsdp.tree.state import RuntimeContext, StepOrder, _FSDPState


def unshard(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Issue the all-gather that fills the full buffers; ``wait_unsharded`` comes next.

    Collective: one all-gather (regions coalesced) over the shard group.
    """
    form = handle.form
    if form.readable is not None and form.needs_fill:
        # A unit that was kept for a second backward is still readable, and the
        # all-gather overwrites the memory that saved tensors refer to.
        make_unreadable(handle)
    if handle.writes.gathered_at is not None:
        handle.writes.gathered_at = shard_versions(handle)
    # Before the memory is taken: a unit that has to give way releases its slot, on CUDA
    # behind its last reader.
    if form.arena_slot is not None:
        form.arena_slot.make_way(context, handle)
    if not form.needs_fill:
        residency.move(handle, HIDDEN)
    elif context.streams.host_waits:
        # The full buffers take the memory of the reduction (``runtime.reduce``). Not in
        # a forward (``set_is_last_backward``): it may run under ``no_grad``, and hooks
        # of users would, too.
        if context.reducing is not None and context.tasks:
            finish_reduction(context, ahead_of=handle)
        residency.allocate_full(handle)
        try:
            handle.ready, _ = _gather(context, handle, async_op=True)
        except BaseException:
            # After Ctrl-C the backend may have the call, and write on.
            _give_up(handle)
            raise
    else:
        _unshard_on_stream(context, context.streams, handle)


def _gather(
    context: RuntimeContext, handle: FlatParamHandle, *, async_op: bool
) -> tuple[Waitable | None, GroupRef | None]:
    """Fill ``full`` by an all-gather; return what to wait for, and the group."""
    form = handle.form
    full, shards = form.gather_lists
    work, ref, source = None, handle.groups.shard_ref, form.source
    if source is None:
        for own_slice, shard in form.fills:
            copy_async(own_slice, shard)
    else:
        shards, ref = source.fill(context, handle)
    if ref is not None:
        group = ref.ref() or ref.get()  # ``get`` raises if the group was destroyed
        operation = Operation(ref, "all_gather", handle.full_fqn, handle.phase, full)
        work = collectives.all_gather_flat(
            full, shards, group, async_op=async_op, operation=operation
        )
    return (work if source is None else source.landing(handle, work)), ref


def _unshard_on_stream(
    context: RuntimeContext, streams: Streams, handle: FlatParamHandle
) -> None:
    """Allocate the full buffers and all-gather, both on the gather stream."""
    with streams.on(streams.gather):
        if context.reducing is not None:
            free_behind_reduction(context.reducing)
        if handle.residency is FREE_PENDING:
            context.retiring.remove(handle)
            _free_behind_reader(handle)
        residency.allocate_full(handle)
        try:
            _, ref = _gather(context, handle, async_op=False)
        except BaseException:
            residency.free_full(handle)
            raise
        handle.events.gather.record(streams.gather)
        if ref is not None:
            ref.marks[handle.events.gather.event] = ref.number
    handle.ready = handle.events.gather


def _limit(handle: FlatParamHandle) -> int:
    """Return how many resharded units may keep their memory."""
    limited = handle.layout.plan.options.limit_all_gathers
    return RETIRING_LIMIT if limited else RETIRING_UNLIMITED


def wait_for_freed_memory(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Free the oldest resharded unit if no further unit may keep memory."""
    # The next all-gather waits for its last reader, and overlaps the unit in use.
    free_oldest(context, keep=_limit(handle) - 1)


def free_oldest(context: RuntimeContext, *, keep: int) -> None:
    """Free the oldest resharded units until ``keep`` units are left."""
    if len(context.retiring) <= keep:  # always on CPU
        return
    # Freeing is legal at any time: the gather stream waits for the last reader, and
    # every later allocation of the gather stream from this memory comes after that
    # wait.
    with context.streams.on(context.streams.gather):
        while len(context.retiring) > keep:
            _free_behind_reader(context.retiring.popleft())


def _free_behind_reader(handle: FlatParamHandle) -> None:
    """Free a resharded unit on the gather stream, behind its last reader."""
    handle.events.free.wait()
    residency.free_full(handle)


def wait_unsharded(handle: FlatParamHandle) -> None:
    """Wait for the all-gather and put the full parameters into the modules."""
    if handle.ready is not None:
        _end_gather(handle, handle.ready)
    if handle.residency is not UNSHARDED:
        residency.use_full(handle)
    residency.make_readable(handle)


def _end_gather(handle: FlatParamHandle, ready: Waitable) -> None:
    """Wait for the all-gather; nothing waits again, even after an error."""
    try:
        ready.wait()
    # Also of Ctrl-C, while the all-gather goes on.
    except BaseException:
        _give_up(handle)
        raise
    finally:
        handle.ready = None


def _give_up(handle: FlatParamHandle) -> None:
    """Leave the full buffers to an all-gather that raised; the unit is sharded."""
    if handle.form.source is not None:
        handle.form.source.leave(handle)
    residency.leave_full(handle)
    # A call that catches the error and runs the unit again must gather again.
    handle.kept_for_forward = False
    residency.free_full(handle)


def reshard(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Put the sharded parameters back into the modules and release the full buffers."""
    if handle.ready is not None:
        # The unit was prefetched and not used; the all-gather still writes into the
        # memory.
        _end_gather(handle, handle.ready)
    handle.kept_for_forward = False
    if handle.residency is UNSHARDED or handle.residency is COPIES_SHOWN:
        residency.use_sharded(handle)
    if handle.residency in NOT_GATHERED or handle.kept_for_backward:
        return
    form = handle.form
    stays = not form.needs_fill
    if form.handed is not None:
        stays |= _take_back(context, handle, form.handed)
    if stays:
        residency.move(handle, SHARDED)
        return
    if handle.reduction.due:
        # A custom ``autograd.Function`` may return a saved parameter as a gradient;
        # copy such a gradient before the memory is freed.
        copy_waiting_views(handle)
    if context.streams.host_waits:
        residency.free_full(handle)
    else:
        current = context.streams.current()
        # AccumulateGrad hooks run on the stream of the forward that made their nodes
        # (``grad_hooks``), and the last reader may be on the compute stream.
        # ``wait_stream`` records an event, so skip it if both streams are the same.
        if current != context.streams.compute:
            wait_unless_captured(current, context.streams.compute)
        handle.events.free.record(current)
        # The memory of the unit is not freed here. The gather stream waits for the free
        # event of an older unit and frees that unit, so memory is reused only behind
        # the last reader and the CPU never waits. Beside the unit in use,
        # RETIRING_LIMIT units keep memory, or RETIRING_UNLIMITED without
        # ``limit_all_gathers``.
        residency.defer_free(handle)
        context.retiring.append(handle)
        # Between steps no all-gather will follow that takes this memory.
        runs = context.entered is not None or context.tasks
        free_oldest(context, keep=_limit(handle) if runs else 0)


def _take_back(
    context: RuntimeContext,
    handle: FlatParamHandle,
    handed: Callable[[FlatParamHandle], bool],
) -> bool:
    """Take back full parameters that a user was given; return if their memory stays."""
    if handle.form.source is not None:
        # Ranks whose user kept a parameter copy no pieces, so that no rank may.
        handle.form.source.drop()
    # What was kept may get other memory, and the next all-gather writes into this
    # memory: behind its readers.
    context.streams.wait_for_caller()
    return handed(handle)


def keep_full(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Put the sharded parameters back; keep the full buffers for the next forward."""
    if (
        handle.ready is not None
        or not handle.form.needs_fill
        or handle.residency is FREE_PENDING
    ):
        reshard(context, handle)
        return
    if handle.residency is UNSHARDED:
        residency.use_sharded(handle)
    if handle.residency is SHARDED or handle.kept_for_forward:
        return
    if handle.writes.gathered_at:
        # The versions are those of the all-gather, because a write or a step between
        # forward and backward makes the full parameters old already.
        handle.kept_for_forward = True
    else:
        # The all-gather came before the setting, so a write to the shards since would
        # not be noticed. Record from the next all-gather on.
        record_gathers(handle)
        reshard(context, handle)


def end_use(
    context: RuntimeContext, handle: FlatParamHandle, reshards: bool, *, kept: bool
) -> None:
    """Reshard the unit, or keep the full buffers for the next forward."""
    handle.kept_for_backward = kept
    if reshards:
        reshard(context, handle)
    else:
        keep_full(context, handle)


def hold_by_hand(handle: FlatParamHandle) -> None:
    """Keep the full parameters, which are shown or will be, for the next forward."""
    if not handle.writes.gathered_at:
        # Gathered before the record began, for the forward or backward that is running.
        handle.writes.gathered_at = shard_versions(handle)
    handle.kept_for_forward = True


def record_gathers(handle: FlatParamHandle) -> None:
    """Record the versions of the shards at every all-gather from now on."""
    if handle.writes.gathered_at is None:
        handle.writes.gathered_at = ()


def discard_full(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Reshard the unit, so that the next use all-gathers the shards again."""
    reshard(context, handle)
    if handle.residency is HIDDEN:
        # The unit is kept for a second backward. The memory stays, and the next
        # all-gather writes into the same memory.
        residency.move(handle, SHARDED)


def release(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Reshard the unit and free the full buffers, also if the unit is kept."""
    end_use(context, handle, reshards=True, kept=False)
    if handle.residency is FREE_PENDING:
        context.retiring.remove(handle)
        with context.streams.on(context.streams.gather):
            _free_behind_reader(handle)


def prefetch_backward(context: RuntimeContext, order: StepOrder, reached: int) -> None:
    """Unshard the unit whose backward comes next. Collective: its all-gather."""
    state = order.before(reached)
    if state is None or state.handle.residency not in NOT_GATHERED:
        return
    # A prefetch waits for its turn if another unit is in the slot of the arena.
    slot = state.handle.form.arena_slot
    if slot is None or slot.is_vacant(state.handle):
        unshard(context, state.handle)


def prefetch_forward(context: RuntimeContext, state: _FSDPState) -> None:
    """Unshard the unit that followed in the last forward, or the listed units."""
    if state.ahead_in_forward:
        prefetch_listed(context, state, state.ahead_in_forward)
        return
    log = state.handle.logs.forward
    following = log.expected[log.position] if log is not None else None
    if isinstance(following, FlatParamHandle):
        _gather_ahead(context, following)


def prefetch_listed(
    context: RuntimeContext, state: _FSDPState, listed: tuple[_FSDPState, ...]
) -> None:
    """Unshard the units that the user listed for ``state``, in that order."""
    for target in listed:
        if target.context is not context:
            raise CompositionError(
                f"Unit {state.name} is to prefetch {target.name}, which is not below "
                "the same outermost fully sharded module. List units of one tree."
            )
        _gather_ahead(context, target.handle)


def _gather_ahead(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Unshard the unit if needed, and remember the unit until the forward ends."""
    slot = handle.form.arena_slot
    if (
        handle.form.needs_fill
        and handle.residency in NOT_GATHERED
        and (slot is None or slot.is_vacant(handle))
    ):
        # On CUDA the prefetched unit takes the place of a resharded unit whose memory
        # is not freed: the all-gather waits for the last reader of that unit and
        # overlaps the compute of the unit in use.
        if context.retiring:
            wait_for_freed_memory(context, handle)
        unshard(context, handle)
        context.prefetched.append(handle)


def drop_unused(context: RuntimeContext) -> None:
    """Reshard units that were prefetched in this forward and not used."""
    for handle in context.prefetched:
        if handle.ready is not None and not handle.kept_for_forward:
            reshard(context, handle)
    context.prefetched.clear()
