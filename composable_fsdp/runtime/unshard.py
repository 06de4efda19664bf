"""Making a unit's parameters full, and sharded again.

``unshard`` issues, ``wait_unsharded`` orders compute behind it and shows the full
leaves, ``reshard`` hides them and gives the memory back. On CUDA the memory of full
buffers belongs to the gather stream::

    gather   [wait free(k-2)] [all-gather k]---event k
    compute  [ ...     k-1    ...          ]  [wait event k] [ ... k ... ]--free(k)

``reshard`` does not free its unit on CUDA: it records when compute is through, makes
the gather stream wait for the event of the unit before it, and frees that one. So a
block is reused only behind its last reader, at most one unit is kept beside the one in
use, be it resharded or gathered ahead, and the CPU never waits. In backward it frees
its unit at once in the same way (``wait_for_freed_memory``).
"""

from __future__ import annotations

import torch

from composable_fsdp.comm import collectives
from composable_fsdp.comm.device import Streams, copy_async
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import step_counts, views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.versions import (
    make_readable,
    make_unreadable,
    set_versions,
)
from composable_fsdp.planning.memory import RETIRING_LIMIT, RETIRING_UNLIMITED
from composable_fsdp.tree.state import RuntimeContext


def unshard(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Issue what makes the full parameters present on every rank of the shard group.

    For each region, reads ``shard`` ``(shard_numel,)`` and fills ``full``
    ``(padded_numel,)`` in rank order, cast to the compute dtype and, if offloaded,
    copied to the device. Does not wait: ``wait_unsharded`` comes before compute.

    Collective: one all-gather (regions coalesced) over the shard group, all of whose
    ranks must call; none if the group has one rank.
    Raises: PhaseError, if the unit is full or on its way already.
    """
    if handle.gathered and not handle.retiring:
        raise PhaseError(
            f"unshard expects fully sharded module {handle.name} to be sharded; it is "
            "full already. Ask handle.gathered first."
        )
    if handle.readable is not None and handle.needs_gather:
        make_unreadable(handle)
    if not handle.needs_gather:
        handle.gathered = True
    elif context.streams is None:
        views.allocate_full(handle)
        handle.ready = _gather(handle, async_op=True)
    else:
        _unshard_on_stream(context, context.streams, handle)


def _gather(
    handle: FlatParamHandle, *, async_op: bool
) -> torch.distributed.Work | None:
    full, shards = handle.gather_lists
    for own_slice, shard in handle.fills:
        copy_async(own_slice, shard)
    group = handle.groups.shard
    if group is None:
        return None
    return collectives.all_gather_flat(full, shards, group, async_op=async_op)


def _unshard_on_stream(
    context: RuntimeContext, streams: Streams, handle: FlatParamHandle
) -> None:
    with torch.cuda.stream(streams.gather):
        if handle.retiring:
            # Resharded a moment ago and not freed: its block is written again, so the
            # gather has to wait for the readers it still has.
            context.retiring.remove(handle)
            handle.retiring = False
            assert handle.free_event is not None
            handle.free_event.wait()
        else:
            views.allocate_full(handle)
        _gather(handle, async_op=False)
        assert handle.gather_event is not None
        handle.gather_event.record(streams.gather)
    handle.ready = handle.gather_event


def _limit(handle: FlatParamHandle) -> int:
    limited = handle.plan.options.limit_all_gathers
    return RETIRING_LIMIT if limited else RETIRING_UNLIMITED


def wait_for_freed_memory(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Free a resharded unit, if all that may be kept are kept. Sends nothing.

    For one that is gathered ahead: its all-gather then waits for the last reader of
    that unit, and runs beside the unit in use.
    """
    free_oldest(context, keep=_limit(handle) - 1)


def free_oldest(context: RuntimeContext, *, keep: int) -> None:
    """Free resharded units until ``keep`` are left, oldest first. Sends nothing.

    Legal at any time: the gather stream waits for the last reader, and whatever it
    allocates from the block comes after that wait.
    """
    streams = context.streams
    if streams is None or len(context.retiring) <= keep:
        return
    with torch.cuda.stream(streams.gather):
        while len(context.retiring) > keep:
            handle = context.retiring.popleft()
            handle.retiring = False
            assert handle.free_event is not None
            handle.free_event.wait()
            views.free_full(handle)


def wait_unsharded(handle: FlatParamHandle) -> None:
    """Order compute behind the all-gather and put the full leaves into the modules.

    On CPU this waits for the collective; on CUDA the current stream does. From now on
    autograd may read the full leaves. Sends nothing.
    """
    if handle.ready is not None:
        handle.ready.wait()
        handle.ready = None
    if not handle.is_full:
        views.use_full(handle)
    make_readable(handle)


def reshard(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Put the sharded leaves back and give up the full parameters. Sends nothing.

    Does nothing to a unit that is sharded already; one that is kept for a second
    backward only hides its full leaves.
    """
    if handle.ready is not None:
        # Prefetched and never used: its collective still writes into the memory.
        handle.ready.wait()
        handle.ready = None
    handle.full_since = None
    if handle.is_full:
        views.use_sharded(handle)
    if not handle.gathered or handle.retiring or handle.kept:
        return
    if handle.reduce_due and handle.needs_gather:
        views.add_waiting_to_reduce_buffers(handle)
    if not handle.needs_gather:
        handle.gathered = False
        return
    if handle.readable is not None:  # make_unreadable, without its call
        set_versions(handle.full_placed, handle.unreadable)
        handle.readable = None
    if context.streams is None:
        views.free_full(handle)
    else:
        assert handle.free_event is not None
        current = torch.cuda.current_stream(handle.device)
        # Hooks of leaves run on the stream that was current at build; the last reader
        # of the weights may be on the forward's. Waiting records an event, so not for
        # itself.
        if current != context.streams.compute:
            current.wait_stream(context.streams.compute)
        handle.free_event.record(current)
        handle.retiring = True
        context.retiring.append(handle)
        free_oldest(context, keep=_limit(handle))


def keep_full(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Hide the full parameters after a backward, but keep them for the next forward.

    A unit that was gathered ahead and not used is resharded. Sends nothing.
    """
    if handle.ready is not None or not handle.needs_gather or handle.retiring:
        reshard(context, handle)
        return
    if handle.is_full:
        views.use_sharded(handle)
    if handle.gathered and handle.full_since is None:
        handle.full_since = shard_versions(handle)


def shard_versions(handle: FlatParamHandle) -> tuple[int, ...]:
    """How often each sharded leaf, or all, was written to; ``.data`` hides a write.

    Steps of optimizers count besides: fused kernels leave versions as they are, and
    ranks that hold no element of the unit see no write at all.
    """
    step_counts.start_counting_steps()
    flats = [r.flat for r in handle.regions if r.flat is not None]
    return (handle.steps, *(x._version for x in (*handle.leaves, *flats)))


def release(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Reshard, and have nothing of the full parameters left. Sends nothing.

    On CUDA the gather stream waits for the last reader and frees; the CPU does not
    wait.
    """
    handle.kept = False
    reshard(context, handle)
    if handle.retiring:
        assert context.streams is not None
        assert handle.free_event is not None
        context.retiring.remove(handle)
        handle.retiring = False
        with torch.cuda.stream(context.streams.gather):
            handle.free_event.wait()
            views.free_full(handle)
