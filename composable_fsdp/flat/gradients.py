"""Gradients of a unit: reduce buffers, flat gradients, and ``.grad`` of the leaves.

The reduction writes the flat gradient, of which ``.grad`` are views. If the user
exchanged ``.grad`` of leaves, sums are added to each, as autograd does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from operator import is_, or_
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import (
    FlatParameter,
    TrainableRegion,
    grad_of,
    post_hooks_of,
)
from composable_fsdp.planning.layout import ShardCuts


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, *, offload: bool
) -> Tensor:
    """Create an uninitialised buffer ``(numel,)`` on the device of the shards."""
    if not offload or device.type == "meta":
        return torch.empty(numel, dtype=dtype, device=device)
    # Copies between host and device are asynchronous only if the host memory is pinned.
    pinned = device.type == "cuda"
    return memory.new_buffer(numel, dtype, torch.device("cpu"), pinned=pinned)


def shard_views(
    shard_cuts: ShardCuts, base: Tensor
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return a view per parameter of a buffer like the shard, and the padding's."""
    cuts = shard_cuts.cuts
    # One split creates all pieces; slices would need one operation each.
    pieces = base.split_with_sizes(cuts.sizes)
    parts = [
        pieces[i] if shape is None else pieces[i].view(shape)
        for i, shape in cuts.parameters
    ]
    return parts, tuple([pieces[i] for i in cuts.gaps])


def gradient_views(region: FlatParameter, base: Tensor) -> list[Tensor | None]:
    """Return ``.grad`` of each leaf as a view of ``base``, None of an absent one."""
    shown: list[Tensor | None] = [*shard_views(region.cuts, base)[0]]
    # FSDP1 does the same: the mean of an empty gradient is NaN, and ``max()`` raises.
    if not region.gradient.keeps_empty:
        for index in region.cuts.absent:
            shown[index] = None
    return shown


def _zero_padding(region: FlatParameter) -> None:
    """Zero the padding in the flat gradient."""
    # If a user multiplies a whole gradient by a factor (0 times inf is NaN), the result
    # must not remain in the padding.
    if region.cuts.cuts.gaps and region.gradient.shard is not None:
        torch._foreach_zero_(shard_views(region.cuts, region.gradient.shard)[1])


def ready_gradient(region: FlatParameter, *, settled: bool = True) -> None:
    """Create the flat gradient, unless leaves show parts of the existing one."""
    # At reductions and not at build: between build and backward the memory is free for
    # optimizer state and activations.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            ready_gradient(region, settled=settled)
        return
    gradient = region.gradient
    # In the steady state the forward has released the flat gradient (``free_cleared``),
    # and the leaves are not examined.
    may_go = gradient.shard is not None and settled and not region.host_copies
    # A new flat gradient, and not the old memory: a user who kept a reference to an old
    # ``.grad`` must keep the values, as with plain autograd.
    if may_go and (are_cleared(region.holders) or not views_are_intact(region)):
        _free_gradient(region)
    if gradient.shard is None:
        numel, device = region.layout.shard_numel, region.device
        if gradient.dtype is region.shard.dtype and not region.offload:
            shard = torch.empty_like(region.shard)  # faster than by numbers
        else:
            shard = new_shard(numel, gradient.dtype, device, offload=region.offload)
        if gradient.keeps_empty:
            gradient.views = gradient_views(region, shard)
        else:
            # The same, but without pieces of padding and of absent leaves.
            places = region.cuts.places
            gradient.views = [each and shard.as_strided(*each) for each in places]
        gradient.shard, gradient.shown = shard, gradient.unshown


def views_are_intact(region: FlatParameter) -> bool:
    """Return whether the views still view the flat gradient, if the latter exists."""
    shard = region.gradient.shard
    if shard is None:
        return True
    begin, size = shard.data_ptr(), shard.itemsize
    # ``p.grad.data = ...`` replaces the memory of a view.
    pairs = zip(region.gradient.views, region.cuts.parts, strict=True)
    return not [
        at
        for view, (start, stop, at) in pairs
        if start < stop and view is not None and view.data_ptr() != begin + at * size
    ]


def free_cleared(handle: FlatParamHandle) -> None:
    """Release the flat gradients that no leaf shows."""
    # A reduction may be writing into the flat gradients.
    if handle.reduction.has_memory or handle.reduction.in_flight:
        return
    for region in handle.layout.trainable:
        # A flat gradient in host memory takes no memory from activations.
        cleared = region.gradient.shard is not None and are_cleared(region.holders)
        if cleared and not region.offload:
            _free_gradient(region)


def are_cleared(leaves: Sequence[nn.Parameter]) -> bool:
    """Return whether no leaf has a ``.grad``."""
    return not [leaf for leaf in leaves if leaf.grad is not None]


def _free_gradient(region: FlatParameter) -> None:
    """Drop the flat gradient and its views, but free no memory that a user holds."""
    region.gradient.shard = None
    region.gradient.views = []


def _add_to_all(region: FlatParameter, sums: Tensor) -> bool:
    """Add ``sums`` to the whole flat gradient, if that is correct for every leaf."""
    gradient = region.gradient
    assert gradient.shard is not None
    if are_cleared(region.leaves):
        # A user may hold a view that was shown, whose values must not change.
        if 1 in gradient.shown:
            return False
        gradient.shard.copy_(sums)
        return True
    if not all(map(is_, map(grad_of, region.leaves), gradient.views)):
        return False
    _zero_padding(region)
    gradient.shard.add_(sums)
    return True


@torch.no_grad()
def own_gradients(region: FlatParameter) -> None:
    """Make ``gradient.shard`` hold ``.grad`` of the flat parameter, else zeros."""
    assert region.flat is not None
    earlier = region.flat.grad
    if earlier is not region.gradient.shard:
        # A user may hold a view, whose values must not change.
        if 1 in region.gradient.shown:
            _free_gradient(region)
            ready_gradient(region)
        assert region.gradient.shard is not None
        if earlier is None:
            region.gradient.shard.zero_()
        else:
            region.gradient.shard.copy_(earlier)
    _zero_padding(region)


def show_on_leaves(
    region: FlatParameter, sums: Tensor | None, arrived: bytes
) -> list[nn.Parameter]:
    """Add reduced gradients to ``.grad``; return the leaves that have hooks to call."""
    if region.flat is not None:
        _show_on_flat(region, sums, arrived)
        return []
    # A single addition for the whole region, if that is correct for every parameter;
    # else to each, in place, as autograd does.
    views, apart = region.gradient.views, False
    if sums is not None and not _add_to_all(region, sums):
        views, apart = gradient_views(region, sums), True
    else:
        note_shown(region, arrived)
    hooked: list[nn.Parameter] = []
    for leaf, view, hit in zip(region.leaves, views, arrived, strict=True):
        if not hit:
            continue
        earlier = leaf.grad
        if apart and view is not None:
            if earlier is not None:
                earlier.detach().add_(view)
            else:
                # A copy and no view: a user may still hold the view of the flat
                # gradient that the leaf showed before, and ``sums`` is temporary.
                leaf.grad = view.to(region.gradient.dtype, copy=True)
        elif earlier is not view:
            if earlier is not None and view is not None:
                # The loss also used the sharded parameter directly (a penalty on
                # weights), and autograd has accumulated that gradient in ``.grad``.
                view.add_(earlier)
            leaf.grad = view
        if leaf._post_accumulate_grad_hooks:
            hooked.append(leaf)
    return hooked


def note_shown(region: FlatParameter, parts: bytes) -> None:
    """Record that the views of the parameters flagged in ``parts`` are shown."""
    gradient = region.gradient
    if gradient.shown is gradient.unshown:
        gradient.shown = parts
    elif gradient.shown != parts:
        gradient.shown = bytes(map(or_, gradient.shown, parts))


def allocate_reduce(handle: FlatParamHandle, owner: torch.cuda.Stream | None) -> None:
    """Allocate the reduce buffers; ``owner`` copies gradients there, None on CPU."""
    for region in handle.layout.trainable:
        buffer = region.reduce.buffer
        # ``memory.allocate``, inlined.
        nbytes, storage = buffer.nbytes, buffer.untyped_storage()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
    handle.reduction.has_memory = True
    handle.events.reduce_writer = owner


def free_reduce(handle: FlatParamHandle) -> None:
    """Free the reduce buffers, behind which the stream that allocated them is."""
    for region in handle.layout.trainable:
        buffer = region.reduce.buffer
        try:  # ``memory.free``, inlined
            buffer.untyped_storage().resize_(0)
        except RuntimeError as error:
            memory.require_unresizable(buffer, error)
    handle.reduction.has_memory = False
    # A later reduction must not wait for this stream: a CUDA graph that is captured on
    # another one may not depend on work from before.
    handle.events.reduce_writer = None


def leave_reduce(handle: FlatParamHandle) -> None:
    """Free the reduce buffers, but not memory in which a failed reduction may write."""
    for region in handle.layout.trainable:
        reduce = region.reduce
        if memory.is_allocated(reduce.buffer):
            views = (*reduce.views, *reduce.gaps)
            reduce.buffer = memory.leave(reduce.buffer, views)
        # Without a temporary buffer the flat gradient is the output of the all-reduce
        # over the replicas, and no leaf shows the flat gradient.
        if reduce.temporary is None:
            _free_gradient(region)
        reduce.temporary = None
    free_reduce(handle)


def zero_missing(handle: FlatParamHandle) -> None:
    """Zero the padding, and the parts of gradients that did not arrive."""
    missing: list[Tensor] = []
    for region in handle.layout.trainable:
        reduce = region.reduce
        missing += reduce.gaps
        if 0 in reduce.arrived:
            pairs = zip(reduce.views, reduce.arrived, strict=True)
            missing += [view for view, hit in pairs if not hit and view.numel()]
    if missing:
        torch._foreach_zero_(missing)


def arrived_flags(handle: FlatParamHandle) -> tuple[bytes, ...]:
    """Return per region which leaves get a gradient, with sums that were held."""
    trainable, now = handle.layout.trainable, list[Any]()
    if handle.rule.fill:
        # All parameters that were not frozen after the forward.
        now += [[leaf.requires_grad for leaf in r.leaves] for r in trainable]
    else:
        now += [region.reduce.arrived for region in trainable]
    pairs = zip(now, handle.reduction.held or now, strict=True)
    return tuple([bytes(map(or_, *pair)) for pair in pairs])


def clear_arrived(handle: FlatParamHandle) -> None:
    """Record that no gradient waits for a reduction."""
    for region in handle.layout.trainable:
        reduce = region.reduce
        reduce.arrived[:] = region.gradient.unshown
        reduce.progress = None


_PLAIN = frozenset({Tensor})


def copy_waiting_views(handle: FlatParamHandle) -> None:
    """Copy waiting gradients that are views of ``full``, before ``full`` is freed."""
    # A custom ``autograd.Function`` may return a saved weight as a gradient, also that
    # of another region.
    for full in handle.form.fulls:
        begin = full.data_ptr()
        end = begin + full.nbytes
        for region in handle.layout.trainable:
            waiting = region.reduce.waiting
            # A subclass is no view of ``full``, and may have no data pointer.
            plain: Iterable[Any] = waiting
            if not _PLAIN.issuperset(map(type, waiting)):
                plain = [each for each in waiting if type(each) is Tensor]
            if [at for at in map(Tensor.data_ptr, plain) if begin <= at < end]:
                region.reduce.waiting = [x if x is None else x.clone() for x in waiting]


def has_arrived(handle: FlatParamHandle) -> bool:
    """Return whether the unit has a gradient that waits to be reduced."""
    return handle.reduction.due and any(
        1 in r.reduce.arrived for r in handle.layout.trainable
    )


def reduce_target(region: TrainableRegion) -> Tensor:
    """Return the buffer ``(shard_numel,)`` that this reduction fills for the region."""
    target = region.reduce.temporary
    if target is None:
        target = region.gradient.shard
    assert target is not None
    return target


# ---- hooks that users registered on the sharded parameters ---------------------
#
# As in a plain model, tensor hooks run first and may replace the new gradient;
# post-accumulate-grad hooks find the total in ``.grad``. Both see this rank's part,
# averaged over ranks, once per reduction, also on a rank without elements of the
# parameter, because a hook may issue a collective.
#
# ``_backward_hooks`` and ``_post_accumulate_grad_hooks`` are private attributes of a
# tensor: a dict, or None without hooks (checked on torch 2.13).

HOOK_WATCHES: list[Callable[[nn.Parameter, Tensor], AbstractContextManager[None]]] = []
"""What stands around each hook, by parameter and gradient (``features.defaults``)."""


@torch.no_grad()
def call_tensor_hooks(region: FlatParameter, sums: Tensor, arrived: bytes) -> None:
    """Call the tensor hooks of parameters that get a gradient now."""
    views, _ = shard_views(region.cuts, sums)
    for leaf, view, hit in zip(region.leaves, views, arrived, strict=True):
        if not hit or not leaf._backward_hooks:
            continue
        gradient = given = view.to(region.gradient.dtype)
        for hook in tuple(leaf._backward_hooks.values()):
            replaced = _called(hook, gradient, leaf, gradient)
            gradient = gradient if replaced is None else replaced
        # A hook has replaced the gradient: write the result back into the sums.
        if gradient is not given:
            view.copy_(gradient)


def _called(
    hook: Callable[[Tensor], Any], given: Tensor, leaf: nn.Parameter, gradient: Any
) -> Any:
    """Call a hook of the user, inside of ``HOOK_WATCHES``."""
    with ExitStack() as around:
        for watch in HOOK_WATCHES if gradient is not None else ():
            around.enter_context(watch(leaf, gradient))
        return hook(given)


@torch.no_grad()
def call_post_hooks(leaves: Iterable[nn.Parameter]) -> None:
    """Call the hooks of parameters whose ``.grad`` was just set or added to."""
    for leaf in leaves:
        hooks = leaf._post_accumulate_grad_hooks
        # A parameter without elements on this rank has ``.grad`` only while the hooks
        # run.
        is_absent = not leaf.numel() and leaf.grad is None
        if is_absent:
            leaf.grad = torch.empty_like(leaf, dtype=leaf.grad_dtype)
        for hook in tuple(hooks.values()) if hooks else ():
            _called(hook, leaf, leaf, leaf.grad)
        if is_absent:
            leaf.grad = None


def _show_on_flat(region: FlatParameter, sums: Tensor | None, arrived: bytes) -> None:
    """Add reduced gradients to ``.grad`` of the flat parameter; call hooks."""
    if sums is not None:
        own_gradients(region)
        assert region.gradient.shard is not None
        region.gradient.shard.add_(sums)
    if 1 in arrived:
        assert region.flat is not None
        region.flat.grad = region.gradient.shard
        note_shown(region, arrived)
        if any(map(post_hooks_of, region.leaves)):
            _call_flat_post_hooks(region, arrived)


@torch.no_grad()
def _call_flat_post_hooks(region: FlatParameter, arrived: bytes) -> None:
    """Run post-accumulate-grad hooks with ``.grad`` viewing the flat gradient."""
    views = region.gradient.views
    for leaf, view, hit in zip(region.leaves, views, arrived, strict=True):
        if hit and leaf._post_accumulate_grad_hooks:
            own, leaf.grad = leaf.grad, view
            call_post_hooks([leaf])
            # A hook may have replaced or cleared ``.grad``.
            left, leaf.grad = grad_of(leaf), own
            if view is not None and left is not view:
                view.zero_() if left is None else view.copy_(left)
