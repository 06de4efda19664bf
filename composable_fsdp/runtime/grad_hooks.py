"""Post-accumulate-grad hooks of the full parameters.

Each hook takes the gradient from the full parameter and keeps the tensor as autograd
made it. The hook of the last gradient that the graph task will bring starts the
reduction of the unit.

``Tensor._post_accumulate_grad_hooks`` and ``torch._C._functions.DelayedError`` are
private (the first is also used in ``user_hooks``, ``reduce`` and ``engine``), checked
on torch 2.13 and 2.11.
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
from composable_fsdp.flat.handle import NO_TASK, BackwardProgress, FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.phases import BACKWARD_POST, illegal_move
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
"""Key of our hook in the hook dicts of a full parameter and of a module's forward."""


def install_grad_hooks(state: _FSDPState) -> None:
    """Register the hooks on the full parameters of the current form, once per form."""
    handle = state.handle
    nodes: tuple[Any, ...] = ()
    if handle.gather_event is not None and handle.leaf_stream is None:
        handle.leaf_stream = torch.cuda.current_stream(handle.device)
    # An AccumulateGrad node exists only with gradients enabled; leaving inference mode
    # enables gradients. The engine runs a node, and the hook with the node, on the
    # stream that was current when the node was made.
    stream = handle.leaf_stream
    on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
    grads = torch.is_grad_enabled()
    with nullcontext() if grads else torch.inference_mode(False), on_stream:
        for region in handle.trainable:
            # Weak references: the garbage collector does not look into the hooks of a
            # tensor (torch 2.13), so a strong reference would keep the model and the
            # shards alive for ever.
            region.owner, link = weakref.ref(state), weakref.ref(region)
            nodes += _accumulators(region.full_leaves)
            for index, leaf in enumerate(region.full_leaves):
                # The effect of ``register_post_accumulate_grad_hook`` without the
                # checks and the handle, which took most of the time. Torch numbers
                # hooks from 0 up, so the key -1 is free.
                leaf._post_accumulate_grad_hooks = hooks = OrderedDict()
                hooks[FSDP_HOOK_KEY] = MethodType(_make_grad_hook(index), link)
    # Keep strong references to the AccumulateGrad nodes: a parameter holds the node
    # only weakly, and ``_will_engine_execute_node`` must be asked about the node that
    # will run.
    handle.form.accumulators = nodes


def _accumulators(leaves: Sequence[nn.Parameter]) -> tuple[Any, ...]:
    """Return the AccumulateGrad nodes of ``leaves``. Gradients must be enabled."""
    if not leaves:
        return ()
    # A single ``DelayedError`` node takes all parameters as inputs, so
    # ``next_functions`` of the node are their AccumulateGrad nodes. The node reads no
    # memory, and raises if the engine runs the node.
    fed = _AccumulateGradFeeder("never run", len(leaves))(*leaves)
    feeder: Any = (fed if isinstance(fed, Tensor) else fed[0]).grad_fn
    return tuple([node for node, _ in feeder.next_functions])


def select_full_form(context: RuntimeContext, state: _FSDPState, *, wide: bool) -> None:
    """Switch the unit to the full form in the parameters' own or the compute dtype.

    A unit that is unsharded in the other form is resharded, and that full buffer is
    freed.

    Args:
        context: the context of the unit's tree.
        state: the unit.
        wide: True selects the parameters' own dtype, False the compute dtype.

    Collective: none.
    """
    handle = state.handle
    if handle.form.full_precision is wide:
        return
    release(context, handle)
    if switch_form(handle):
        install_grad_hooks(state)


# A function per index serves all units: a hook is then a single object, the bound
# method of a weak reference to the region.
@cache
def _make_grad_hook(index: int) -> Callable[[weakref.ref[FlatParameter], Tensor], None]:
    """Return the post-accumulate-grad hook of the full parameter ``index`` of a region.

    The first gradient of a parameter since the last reduction is kept, and is copied to
    the reduce buffer together with the other gradients of the unit. Later gradients are
    added in the reduce buffer, in the reduce dtype.
    """

    def arrive(link: weakref.ref[FlatParameter], leaf: Tensor) -> None:
        region = link()
        assert region is not None
        unit: _FSDPState | None = region.owner()
        assert unit is not None
        handle = unit.handle
        gradient = leaf.grad
        # The gradient is None if a custom Function returned none; the hook is still
        # counted. A parameter that was frozen after the forward gets no gradient, as in
        # plain torch.
        if gradient is not None and not region.leaves[index].requires_grad:
            leaf.grad = gradient = None
        if gradient is not None:
            leaf.grad = None
            if gradient.requires_grad:  # with create_graph
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
            del gradient  # let the reduction free the gradient
        # A gradient of another graph task (a reentrant checkpoint inside the unit) is
        # only accumulated.
        progress = handle.backward
        if progress.task == current_task():
            progress.pending -= 1
            if progress.pending == 0:
                _on_all_gradients(unit, handle)

    return arrive


def _on_unexpected_grad(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Have the end of the graph task reduce a gradient that no pre-backward announced.

    Raises: PhaseError, if the unit is sharded, because the operations before this
        gradient may have read parameters that are not valid.
    """
    context = state.context
    assert context is not None
    if handle.form.readable is None:
        raise PhaseError(
            f"Backward reached a parameter of unit {handle.name} while the unit is "
            "sharded: through a tensor that its forward did not return. Return the "
            "tensor from the forward, or keep it on an attribute of the unit's module "
            "from the first forward on."
        )
    handle.reduce_due = True
    if handle.backward.task == NO_TASK:
        task = current_task()
        register_task_end(context, state, task)
        # -1 never counts down to 0, so the final callback of the graph task reduces.
        handle.backward = BackwardProgress(task, pending=-1)


def _on_all_gradients(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard and reduce the unit, unless an open forward call will do so later."""
    context = state.context
    assert context is not None
    progress = handle.backward
    # With a schedule (``unused_params``) the reduction of the unit has a fixed turn,
    # which is at the same point on all ranks.
    scheduled = progress.tapes and progress.tapes[0].schedule is not None
    # If every open call has an alias, the last ``input_done`` reshards and reduces.
    if progress.expected_calls and progress.expected_calls == progress.open_calls:
        return
    if progress.open_calls == 0:
        # Reshard first: the reduce buffer can then take the memory of the full
        # parameters.
        reshard_after_backward(state, handle)
    if state.sync_gradients and not scheduled:
        for region in handle.trainable:
            if progress.open_calls and 0 in region.arrived:
                # Missing gradients may still arrive without a pre-backward, from a
                # reentrant checkpoint inside the unit. The last ``input_done`` comes
                # after the checkpoint and reduces once.
                break
        else:
            reduce_gradients(context, handle)


def reshard_after_backward(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard the unit after backward, or keep the unit full if so configured.

    Inside a forward of the unit nothing happens: the end of that forward decides.
    """
    context = state.context
    assert context is not None
    if handle.calls:
        return
    if BACKWARD_POST not in handle.phase.followers:
        raise illegal_move(handle.name, handle.phase, BACKWARD_POST)
    handle.phase = BACKWARD_POST
    if state.reshard_after_backward:
        reshard(context, handle)
        if context.retiring:
            # With BACKWARD_PRE the next all-gather is for the unit after the next, and
            # is issued after this unit's reduction, so the all-gather waits for this
            # unit in any case. Freeing now costs no overlap.
            wait_for_freed_memory(context, handle)
    else:
        keep_full(context, handle)
