"""Unshard and reshard a unit by hand, outside or inside a step."""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from composable_fsdp.access.settings import state_of_unit
from composable_fsdp.access.unshard_params import unshard_params
from composable_fsdp.comm.meeting import Call
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.flat.residency import HIDDEN, NOT_GATHERED, shards_are_unchanged
from composable_fsdp.runtime import unshard as verbs
from composable_fsdp.runtime.forward import call_method
from composable_fsdp.runtime.graph_task import current_task, require_no_other_backward
from composable_fsdp.runtime.recover import is_live, recover
from composable_fsdp.tree import moments
from composable_fsdp.tree.root import compare_models, ensure_root, meet_over
from composable_fsdp.tree.state import (
    RuntimeContext,
    _FSDPState,
    _get_module_fsdp_state,
)
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    _get_unit_state,
    inside_wrappers,
    no_unit,
    require_module,
)


class UnshardHandle:
    """A pending all-gather; ``unshard(module, async_op=True)`` returns this object."""

    __slots__ = ("_handle",)

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle: FlatParamHandle | None = handle

    def wait(self) -> None:
        """Wait for the all-gather and show the full parameters.

        A call after another, or after the unit was used or resharded, does nothing.
        """
        handle, self._handle = self._handle, None
        # ``kept_for_forward`` is False after the unit was resharded.
        if handle is not None and handle.kept_for_forward:
            for call in moments.HANDED_OUT:
                call(handle)
            verbs.wait_unsharded(handle)


def unshard(module: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """All-gather the full parameters of the unit ``module`` and show them.

    The unit stays unsharded until the unit's next forward or backward reshards, or
    until ``reshard``. Units below are unchanged. An unsharded unit communicates
    nothing.

    Writes to full parameters, and attributes set on them (``requires_grad``), are lost;
    see ``unshard_params``. A full parameter that is kept shows this rank's rows after
    the reshard; one that a forward has read after the next optimizer step, and keeps
    the unit's full memory until then. If the shards change meanwhile by anything but
    ``load_state_dict`` or ``set_full_param``, as an optimizer step, the next forward
    raises; a write through ``.data`` is not detected. An optimizer that is made of the
    full parameters raises at its first step.

    With ``async_op`` the call returns an ``UnshardHandle`` at once; its ``wait()``, or
    the unit's forward, shows the parameters.

    Collective: the unit's all-gather over its shard group, if the unit is sharded or
        keeps the full parameters of a forward.
    Raises: CompositionError, if ``module`` is no fully sharded module; PhaseError,
        inside ``unshard_params``; DesyncError, if another rank makes another call,
        before anything is sent.

    >>> pending = unshard(model.head, async_op=True)
    >>> hidden = model.body(x)
    >>> pending.wait()
    """
    state = state_of_unit(module, "unshard")
    context = _context(state, "unshard")
    handle = state.handle
    # A unit that is whole at rest (ZERO1) also keeps those of its last forward.
    stays_full = handle.layout.plan.stays_full and handle.residency is HIDDEN
    if (
        (stays_full or not handle.kept_for_forward)
        and handle.form.needs_fill
        and handle.residency not in NOT_GATHERED
        and context.entered is None
        and handle.backward.task == NO_TASK
    ):
        # Those of a forward that waits for its backward; the shards may have changed.
        verbs.discard_full(context, handle)
    verbs.record_gathers(handle)
    if handle.residency in NOT_GATHERED:
        # A unit that every rank holds whole sends nothing: a rank may be alone.
        if handle.form.needs_fill:
            meet_over([state], Call("unshard", state.title), always=False)
        # Inside a forward the iteration has checked, and has waited for the optimizer.
        if context.entered is None:
            if not shards_are_unchanged(handle):
                moments.changes.adopt(state, values_required=False)
                moments.changes.follow_flags(state)
            compare_models(state, replicas=False)
            # The optimizer wrote the shards on the caller's stream.
            context.streams.wait_for_caller()
        verbs.unshard(context, handle)
    verbs.hold_by_hand(handle)
    pending = UnshardHandle(handle)
    if async_op:
        return pending
    pending.wait()
    return None


def reshard(module: nn.Module) -> None:
    """Show the sharded parameters of the unit ``module`` and free the full parameters.

    Units below are unchanged. Backward all-gathers again.

    Raises: CompositionError, if ``module`` is no fully sharded module; PhaseError,
        inside the unit's own forward or backward, or inside ``unshard_params``.
    """
    state = state_of_unit(module, "reshard")
    context = _context(state, "reshard")
    handle = state.handle
    if handle.calls or handle.backward.task != NO_TASK:
        raise PhaseError(
            f"reshard was called on {state.name} while its "
            f"{'forward' if handle.calls else 'backward'} is running, which "
            "needs the full parameters. Call it before or after."
        )
    verbs.reshard(context, handle)
    # On CUDA reshard defers the release of the memory.
    verbs.free_oldest(context, keep=0)


def reset_iter_state(module: nn.Module) -> None:
    """Reset the tree of the root ``module`` after a forward or backward that raised.

    All units are resharded, and gradients that were not reduced are discarded, with
    those of ``no_sync``. Waits for the collectives that this rank has issued.

    Raises: CompositionError, if ``module`` is no unit; PhaseError, unless it is a root
        outside of forward, backward and ``unshard_params``.
    """
    state = state_of_unit(module, "reset_iter_state")
    context = _context(state, "reset_iter_state")
    if not state._is_root:
        raise PhaseError(
            f"reset_iter_state expects the outermost fully sharded module, got "
            f"{state.name}, which is inside another. Call it on the module that the "
            "last fully_shard was applied to."
        )
    if context.entered is not None or current_task() != NO_TASK:
        raise PhaseError(
            f"reset_iter_state was called on {state.name} while its forward or "
            "backward is running. Call it after the exception has left both."
        )
    recover(context, drop_gradients=True)


def is_sharded(module: nn.Module) -> bool:
    """Return whether the fully sharded ``module`` shows its sharded parameters now.

    True also while a unit keeps memory of full parameters that no module shows.

    Raises: CompositionError, if ``module`` is no fully sharded module.
    """
    return not state_of_unit(module, "is_sharded").handle.is_full


def full_shape(parameter: Tensor) -> torch.Size:
    """Return the shape that ``parameter`` has in the unsharded model.

    A sharded parameter shows the shape of this rank's part. For any other parameter the
    result is ``parameter.shape``.

    Raises: CompositionError, for a flat parameter, which joins several parameters.
    """
    if find_flat(parameter) is not None:
        raise CompositionError(
            "full_shape() needs an original parameter, and a flat parameter joins what "
            "this rank holds of several. Ask for the parameters of model.parameters()."
        )
    ref = find_param(parameter)
    return parameter.shape if ref is None else torch.Size(ref.shape)


def _context(state: _FSDPState, what: str) -> RuntimeContext:
    """Return the context of the unit's tree, after recovery from a step that raised."""
    context = ensure_root(state)
    if context.summoned is not None:
        raise context.summoned.refusal(f"{what} of {state.name} was called")
    # A backward that raised leaves its graph tasks open, a forward that was interrupted
    # leaves ``entered`` set; neither calls a hook that could clean up.
    if context.tasks and current_task() == NO_TASK:
        require_no_other_backward(context)
        recover(context, drop_gradients=True)
    elif context.entered is not None and not is_live(context):
        recover(context, drop_gradients=False)
    return context


def _unshard_params_recurse(
    module: nn.Module,
    state: _FSDPState,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> AbstractContextManager[None]:
    """Return ``unshard_params`` under FSDP1's name, with its arguments."""
    return unshard_params(
        module if recurse else state.module,
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.name(...)`` unshard and reshard the unit, as ``module(...)`` does.

    The method may call the forward of ``module`` or of units below. Autograd treats the
    method's inputs and outputs as inputs and outputs of a forward. Registration of a
    registered method, or of ``"forward"``, does nothing. So does a module that has
    nothing to do with sharding; a script therefore also runs unsharded.

    Collective: none; each call of the method issues the collectives of a forward.
    Raises: CompositionError, if the method does not exist or is a generator or
        coroutine, or if ``module`` is in a sharded model but is no unit itself.

    >>> register_forward_method(model, "generate")
    """
    require_module(module, "register_forward_method")
    module = inside_wrappers(module)
    method = getattr(module, name, None)
    if not callable(method):
        raise CompositionError(
            f"register_forward_method expects the name of a method; "
            f"{type(module).__name__} has no method {name!r}. Check the name, or pass "
            "the module that has it."
        )
    state = _get_unit_state(module)
    if state is None:
        # A part of a sharded model cannot gather what it shows.
        if _get_module_fsdp_state(module) is not None or _get_fsdp_states(module):
            raise no_unit(module, f"register_forward_method({name!r})", recurse=False)
        return
    # ``functools.partial`` has ``func``: the method is registered already.
    if name == "forward" or getattr(method, "func", None) is call_method:
        return
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise CompositionError(
            f"{type(module).__name__}.{name} is a generator or a coroutine: its body "
            "would run after the unit is sharded again. Register the method that "
            "computes one result, and call that from it."
        )
    hooked = functools.partial(call_method, state, module, method)
    setattr(module, name, functools.update_wrapper(hooked, method))


register_fsdp_forward_method = register_forward_method
"""The name of this function in torch."""
