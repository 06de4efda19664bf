"""Gradients of full leaves: each waits, as autograd made it, for the unit's others.

The last one that a graph task will bring makes the unit reduce.

``Tensor._post_accumulate_grad_hooks`` and ``torch._C._functions.DelayedError`` are
private; used only here (the first in ``leaf_hooks``, too), checked on torch 2.13 and
2.11.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.full_forms import switch_form
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.graph_task import current_task, register_task_end
from composable_fsdp.runtime.reduce import (
    copy_grads_to_reduce_buffers,
    reduce_gradients,
)
from composable_fsdp.runtime.unshard import (
    keep_full,
    release,
    reshard,
    wait_for_freed_memory,
)
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_AccumulateGradFeeder: Any = torch._C._functions.DelayedError
FSDP_HOOK_KEY = -1
"""Key of our hook among those of a full leaf, or of a module's forward."""


def install_grad_hooks(state: _FSDPState) -> None:
    """Attach the arrival hooks to the full leaves of the current form, once."""
    handle = state.handle
    nodes: tuple[Any, ...] = ()
    if handle.gather_event is not None and handle.leaf_stream is None:
        handle.leaf_stream = torch.cuda.current_stream(handle.device)
    # Without gradients there is no node to ask; leaving inference mode turns them on.
    # The engine runs a node, and our hook with it, on the stream it was made on.
    stream = handle.leaf_stream
    on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
    grads = torch.is_grad_enabled()
    with nullcontext() if grads else torch.inference_mode(False), on_stream:
        for region in handle.trainable:
            # Weakly: the collector does not look into the hooks of a tensor (torch
            # 2.13), so a strong reference would keep the model, or its shards, alive
            # for ever.
            region.owner, link = weakref.ref(state), weakref.ref(region)
            nodes += _accumulators(region.full_leaves)
            for index, leaf in enumerate(region.full_leaves):
                # What register_post_accumulate_grad_hook sets, less its checks and its
                # handle, which took longer than all else. Torch numbers from 0 up.
                leaf._post_accumulate_grad_hooks = hooks = OrderedDict()
                hooks[FSDP_HOOK_KEY] = MethodType(_make_grad_hook(index), link)
    # A leaf keeps its node only weakly: the handle does, so that the node we ask the
    # engine about is the node it runs.
    handle.accumulators = nodes


def _accumulators(leaves: Sequence[nn.Parameter]) -> tuple[Any, ...]:
    """The nodes that accumulate into ``leaves``, by way of one node that feeds all.

    It reads no memory, and would raise if it was run. Gradients must be enabled.
    """
    if not leaves:
        return ()
    fed = _AccumulateGradFeeder("never run", len(leaves))(*leaves)
    feeder: Any = (fed if isinstance(fed, Tensor) else fed[0]).grad_fn
    return tuple([node for node, _ in feeder.next_functions])


def select_full_form(context: RuntimeContext, state: _FSDPState, *, wide: bool) -> None:
    """Make the unit ready to be full in the parameters' own dtype, or in compute's.

    A unit that is full in the other one gives it up. Sends nothing.
    """
    handle = state.handle
    if handle.wide is wide:
        return
    release(context, handle)
    if switch_form(handle):
        install_grad_hooks(state)


@cache
def _make_grad_hook(index: int) -> Callable[[weakref.ref[FlatParameter], Tensor], None]:
    """The post-accumulate hook of full leaf ``index``: it takes the gradient away.

    The first of a reduction waits to be moved to the leaf's view of the reduce buffer
    with all others; later ones are added there, in the dtype of the reduction. One
    function for all units, so that a hook is one object: a method of a link to its
    region.
    """

    def arrive(link: weakref.ref[FlatParameter], leaf: Tensor) -> None:
        region = link()
        assert region is not None
        unit: _FSDPState | None = region.owner()
        assert unit is not None
        handle = unit.handle
        gradient = leaf.grad
        # None, if a custom Function returned no gradient: counted, nothing to move.
        # One that was frozen after the forward takes none, as in plain torch.
        if gradient is not None and not region.leaves[index].requires_grad:
            leaf.grad = gradient = None
        if gradient is not None:
            leaf.grad = None
            if gradient.requires_grad:  # create_graph
                gradient = gradient.detach()
            if not handle.reduce_due:
                _on_unexpected_grad(unit, handle)
            if region.arrived[index]:
                assert unit.context is not None
                copy_grads_to_reduce_buffers(unit.context, handle)
                region.reduce_views[index].add_(gradient)
            else:
                region.waiting[index] = gradient
                region.arrived[index] = 1
            del gradient  # the reduction frees it
        # Of another graph task (a checkpoint inside the unit): only accumulated.
        if handle.task == current_task():
            handle.pending -= 1
            if handle.pending == 0:
                _on_all_gradients(unit, handle)

    return arrive


def _on_unexpected_grad(state: _FSDPState, handle: FlatParamHandle) -> None:
    """A gradient that no pre-backward announced: have somebody reduce it.

    Raises: PhaseError, if the unit is not gathered, so that what was read of its
    weights, if anything, is of no use.
    """
    context = state.context
    assert context is not None
    if handle.readable is None:
        raise PhaseError(
            f"Backward reached a parameter of unit {handle.name} while the unit is "
            "sharded: through a tensor that its forward did not return. Return the "
            "tensor from the forward, or keep it on an attribute of the unit's module "
            "from the first forward on."
        )
    handle.reduce_due = True
    if handle.task == NO_TASK:
        register_task_end(context, state, current_task())
        # Nothing counts down, so the final callback reduces.
        handle.pending = -1


def _on_all_gradients(state: _FSDPState, handle: FlatParamHandle) -> None:
    context = state.context
    assert context is not None
    # With a schedule, in the unit's turn; see ``write_unit_values``.
    scheduled = handle.tapes and handle.tapes[0].schedule is not None
    if handle.expected_calls and handle.expected_calls == handle.open_calls:
        return
    if handle.open_calls == 0:
        # First: the reduce buffer can have the memory of the weights.
        reshard_after_backward(state, handle)
    if state.sync_gradients and not scheduled:
        for region in handle.trainable:
            if handle.open_calls and 0 in region.arrived:
                # They may yet arrive, unannounced: from a reentrant checkpoint inside
                # the unit. It is through when the last input is, so that reduces, once.
                break
        else:
            reduce_gradients(context, handle)


def reshard_after_backward(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Give the weights up, or keep them for the next forward if so told.

    Inside a forward of the unit they stay, and its end decides.
    """
    context = state.context
    assert context is not None
    if handle.calls:
        return
    handle.phase = Phase.BACKWARD_POST
    if state.reshard_after_backward:
        reshard(context, handle)
        if context.retiring:
            # With BACKWARD_PRE the next all-gather is that of the unit after the next,
            # and comes behind this unit's reduction: it waits for this unit anyway.
            wait_for_freed_memory(context, handle)
    else:
        keep_full(context, handle)
