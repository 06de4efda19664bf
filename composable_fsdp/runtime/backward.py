"""Backward of a unit: the hooks of the full parameters, and the end of its use.

Two events drive the unit once backward has entered it (``unit_forward``), and
``graph_task`` ends the units that saw only a part of them:

* *gradients complete*: the post-accumulate-grad hook of each full parameter keeps the
  gradient as autograd made the tensor, and decrements ``pending``, the number of
  parameters that this graph task will reach. At 0 the unit may reduce.
* *parameters no longer needed*: ``input_done`` has run for each input that requires
  grad. With complete gradients the unit reshards.

``Tensor._post_accumulate_grad_hooks`` is private (also used in ``user_hooks``,
``reduce`` and ``engine``), checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.comm.ranges import OPEN, end_range
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle, FullForm
from composable_fsdp.flat.param_form import ParamForm
from composable_fsdp.flat.precision import switch_form
from composable_fsdp.flat.region import TrainableRegion
from composable_fsdp.phases import BACKWARD_POST
from composable_fsdp.runtime.earlier_forms import (
    take_earlier_form,
    through_earlier_forward,
)
from composable_fsdp.runtime.graph_task import (
    current_task,
    join_unannounced,
    reset_failed_graph_tasks,
)
from composable_fsdp.runtime.leaf_streams import make_nodes
from composable_fsdp.runtime.reduce import (
    copy_grads_to_reduce_buffers,
    expect_gradients,
    reduce_gradients,
)
from composable_fsdp.runtime.unshard import (
    keep_full,
    prefetch_backward,
    release,
    reshard,
    wait_for_freed_memory,
)
from composable_fsdp.tree.state import ForwardRecord, RuntimeContext, _FSDPState

FSDP_HOOK_KEY = -1
"""Key of our hook in the hook dicts of a full parameter and of a module's forward."""


class GradientOrder(ForwardRecord):
    """The default: a unit reduces as soon as its gradients are complete."""

    __slots__ = ()

    reduce = staticmethod(reduce_gradients)
    prefetch = staticmethod(prefetch_backward)

    def restore_form(self, state: _FSDPState, form: FullForm) -> None:
        """Make ``form`` current, as ``select_form``."""
        select_form(state, form, self)


def select_form(state: _FSDPState, form: FullForm, tape: ForwardRecord) -> None:
    """Make ``form``, whose full leaves a graph holds, the current form of the unit.

    ``form`` is of this or an earlier layout; ``tape`` records its forward.

    Raises: PhaseError, as ``take_earlier_form``. Collective: as ``take_earlier_form``.
    """
    context = state.context
    assert context is not None
    if form is state.handle.other_form:
        select_full_form(context, state, wide=form.full_precision)
    else:
        take_earlier_form(state, form, tape)
        install_grad_hooks(state)


def install_grad_hooks(state: _FSDPState) -> None:
    """Register the hooks on the full parameters of the current form, once per form."""
    handle = state.handle
    # An AccumulateGrad node exists only with gradients enabled; leaving inference mode
    # enables gradients.
    grads = torch.is_grad_enabled()
    with nullcontext() if grads else torch.inference_mode(False):
        for region in handle.layout.trainable:
            # Weak references: the garbage collector does not look into the hooks of a
            # tensor (torch 2.13), so a strong reference would keep the model and the
            # shards alive for ever.
            region.reduce.owner, link = weakref.ref(state), weakref.ref(region)
            for index, leaf in enumerate(region.full.leaves):
                # The effect of ``register_post_accumulate_grad_hook`` without the
                # checks and the handle, which took most of the time. Torch numbers
                # hooks from 0 up, so the key -1 is free.
                leaf._post_accumulate_grad_hooks = hooks = OrderedDict()
                hooks[FSDP_HOOK_KEY] = MethodType(_make_grad_hook(index), link)
        if handle.layout.forms:
            _hook_forms(handle)
        make_nodes(handle)


def _hook_forms(handle: FlatParamHandle) -> None:
    """Let the hooks of parameters with a form take plain gradients from the form."""
    for region in handle.layout.trainable:
        link = weakref.ref(region)
        for index, (slot, leaf) in enumerate(
            zip(region.layout.parameters, region.full.leaves, strict=True)
        ):
            # Not through the cache, which would keep the mesh of the form alive.
            arrive = _make_grad_hook.__wrapped__(index, handle.layout.forms[slot.index])
            hooks: Any = leaf._post_accumulate_grad_hooks
            hooks[FSDP_HOOK_KEY] = MethodType(arrive, link)


def select_full_form(context: RuntimeContext, state: _FSDPState, *, wide: bool) -> None:
    """Switch the unit to the full form in the parameters' own or the compute dtype.

    A unit that is unsharded in the other form is resharded, and that full buffer is
    freed.
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
def _make_grad_hook(
    index: int, form: ParamForm | None = None
) -> Callable[[weakref.ref[TrainableRegion], Tensor], None]:
    """Return the post-accumulate-grad hook of the full parameter ``index`` of a region.

    Plain parameters have no ``form``.
    """

    def arrive(link: weakref.ref[TrainableRegion], leaf: Tensor) -> None:
        region = link()
        unit: _FSDPState | None = None if region is None else region.reduce.owner()
        if region is None or unit is None:
            leaf.grad = None
            shape = tuple(leaf.shape)
            raise PhaseError(through_earlier_forward(f"a parameter of shape {shape}"))
        reduce = region.reduce
        handle, task = unit.handle, current_task()
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
            if form is not None:
                gradient = form.gradient(gradient)
            if handle.backward.task != task or not handle.reduction.due:
                _on_unexpected_grad(unit, handle)
            if reduce.arrived[index]:
                assert unit.context is not None
                copy_grads_to_reduce_buffers(unit.context, handle)
                reduce.views[index].add_(gradient)
            else:
                reduce.waiting[index] = gradient
                reduce.arrived[index] = 1
            del gradient  # let the reduction free the gradient
        # A gradient of another graph task (a reentrant checkpoint inside the unit) is
        # only accumulated.
        progress = handle.backward
        if progress.task == task:
            progress.pending -= 1
            if progress.pending == 0:
                _on_all_gradients(unit, handle)

    return arrive


def _on_unexpected_grad(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Have the end of the graph task reduce a gradient that no pre-backward announced.

    Gradients of an earlier backward may wait (``no_sync``), and the unit may be part of
    an outer graph task.

    Raises: PhaseError, if the unit is sharded, because the operations before this
        gradient may have read parameters that are not valid.
    """
    context = state.context
    assert context is not None
    if handle.backward.task in context.dead:
        reset_failed_graph_tasks(context)
    if handle.form.readable is None:
        raise PhaseError(
            f"Backward reached a parameter of unit {handle.name} while the unit is "
            "sharded: through a tensor that its forward did not return. Return the "
            "tensor from the forward, or keep it on an attribute of the unit's module "
            "from the first forward on."
        )
    expect_gradients(handle)
    if handle.backward.task == NO_TASK:
        join_unannounced(context, state, current_task())


def _on_all_gradients(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard and reduce the unit, unless an open forward call will do so later."""
    context = state.context
    assert context is not None
    progress = handle.backward
    # If every open call has an alias, the last ``input_done`` reshards and reduces.
    if progress.expected_calls and progress.expected_calls == progress.open_calls:
        return
    if progress.open_calls == 0:
        # Reshard first: the reduce buffer can then take the memory of the full
        # parameters.
        reshard_after_backward(state, handle)
    if state.settings.sync_gradients:
        for region in handle.layout.trainable:
            if progress.open_calls and 0 in region.reduce.arrived:
                # Missing gradients may still arrive without a pre-backward, from a
                # reentrant checkpoint inside the unit. The last ``input_done`` comes
                # after the checkpoint and reduces once.
                break
        else:
            reduce = progress.tapes[0].reduce if progress.tapes else reduce_gradients
            reduce(context, handle)


def reshard_after_backward(state: _FSDPState, handle: FlatParamHandle) -> None:
    """Reshard the unit after backward, or keep the unit full if so configured.

    Inside a forward of the unit nothing happens: the end of that forward decides.
    """
    context = state.context
    assert context is not None
    if handle.running.calls:
        return
    handle.phase = BACKWARD_POST
    if OPEN:
        end_range("backward", context, handle.full_fqn)
    if state.settings.reshard_after_backward:
        reshard(context, handle)
        if context.retiring:
            # With BACKWARD_PRE the next all-gather is for the unit after the next, and
            # is issued after this unit's reduction, so the all-gather waits for this
            # unit in any case. Freeing now costs no overlap.
            wait_for_freed_memory(context, handle)
    else:
        keep_full(context, handle)
