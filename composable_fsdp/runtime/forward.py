"""Forward of a unit: functions that the hooks of the modules call.

::

    pre_forward    begin the iteration if outermost, unshard, alias the inputs
    post_forward   hook the outputs, reshard unless backward wants the weights kept

A recomputed forward (activation checkpointing) runs inside backward: pre_forward makes
the unit full if needed, the use is not recorded, and backward reshards the unit.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm.ranges import OPEN, begin_range, end_range, profiler
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import residency
from composable_fsdp.flat.forward_writes import (
    copy_all_to_shards,
    copy_writes_to_shards,
    is_unchanged,
    snapshot,
    was_written,
)
from composable_fsdp.flat.functional_params import save_functional_params
from composable_fsdp.flat.handle import NO_TASK
from composable_fsdp.flat.part_guards import REFUSE
from composable_fsdp.flat.residency import NOT_GATHERED, UNSHARDED, version_of
from composable_fsdp.phases import BACKWARD_PRE, FORWARD, IDLE, illegal_move
from composable_fsdp.runtime.backward import (
    FSDP_HOOK_KEY,
    GradientOrder,
    UnitForward,
    pre_backward,
)
from composable_fsdp.runtime.container_copies import (
    Copies,
    apply_changes,
    record_copies,
    write_casts_back,
)
from composable_fsdp.runtime.escaped_tensors import (
    below_transforms,
    first_number,
    grad_fns_of,
    made_since,
    sequence_number,
    tensors_on_attributes,
    written_in_place,
)
from composable_fsdp.runtime.graph_task import current_task
from composable_fsdp.runtime.nested_tensors import map_tensors, tensors_in, to_device
from composable_fsdp.runtime.offload import synchronize_copy_stream
from composable_fsdp.runtime.precision import apply_precision, cast_floating
from composable_fsdp.runtime.recover import (
    begin_iteration,
    end_iteration,
    is_live,
    mode_of,
    recover,
    reshard_late_modules,
)
from composable_fsdp.runtime.returned_weights import (
    copy_kept_weights,
    copy_weights,
    find_kept_weights,
    is_weight,
)
from composable_fsdp.runtime.threads import runs_elsewhere
from composable_fsdp.runtime.unshard import (
    drop_unused,
    hold_for_backward,
    prefetch_forward,
    reshard,
    shard_versions,
    unshard,
    wait_unsharded,
)
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_LAZY_OUTPUTS = frozenset(
    (AsyncGeneratorType, CoroutineType, GeneratorType, map, filter)
)
"""Types of outputs whose computation has not begun when the forward returns."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NO_CONTAINERS = frozenset(
    {Tensor, nn.Parameter, tuple, bool, int, float, str, type(None)}
)
"""Types of arguments into which a forward cannot put a tensor."""


def pre_forward(
    state: _FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Unshard the unit before its forward, and alias the inputs that require grad.

    The outermost unit also begins the iteration and moves inputs to a CUDA device.

    Returns: the new ``(args, kwargs)`` if an argument was replaced, else None.
    Raises: PhaseError, inside ``unshard_params``; DesyncError, if ranks run different
        units.
    Collective: the all-gather of the unit, unless already unsharded, and of prefetched
        units.
    """
    context = state.context or ensure_root(state)
    if context.summoned is not None:
        raise _inside_block(state, context.summoned.name)
    recomputing, handle, replaced = current_task() != NO_TASK, state.handle, None
    calls, searches = handle.running.calls, state.searches
    # Before the all-gather, whose range lies inside.
    if profiler._is_profiler_enabled:
        begin_range("forward", context, handle.full_fqn)
    copies: Copies = []
    if not recomputing and (
        context.outermost is None
        or (context.outermost is state and calls and not is_live(context))
    ):
        # ``outermost`` may be stale after a KeyboardInterrupt: ``is_live`` asks the
        # call stack.
        begin_iteration(context, state)
        if not context.streams.host_waits:
            replaced = to_device(args, kwargs, state.device, copies)
            if replaced is not None:
                args, kwargs = replaced
    log = handle.logs.forward
    if log is not None and not recomputing:
        # Compare before any collective is issued, so that ranks that disagree can
        # raise.
        if log.expected[log.position] is handle:
            log.position += 1
        else:
            log.depart(handle, mode_of(context, handle))
    if state.precision is not None:
        cast = apply_precision(context, state, module, args, kwargs, copies)
        if cast is not None:
            args, kwargs = replaced = cast
    if handle.residency in NOT_GATHERED:
        unshard(context, handle)
    if state.settings.prefetches_forward and not recomputing:
        prefetch_forward(context, state)
    if handle.residency is not UNSHARDED:
        wait_unsharded(handle)
    elif not recomputing and not calls:
        # ``use_full`` does not run, so record tensors of ``functional_call`` here.
        save_functional_params(handle, over_full=True)
    if not handle.guards.open:  # ``allow_part_calls``, inlined
        for hooks in handle.guards.tables:
            if REFUSE in hooks:
                del hooks[REFUSE]
        handle.guards.open = True
    if not recomputing:
        if searches.looks and not calls:
            _look_for_writes(state, module)
        if FORWARD not in handle.phase.followers:
            raise illegal_move(handle.name, handle.phase, FORWARD)
        handle.phase = FORWARD
        if len(state.modules) > 1 and not state.remaining:
            state.remaining = frozenset(map(id, state.modules))
    if not torch.is_grad_enabled() or (recomputing and handle.backward.task != NO_TASK):
        # After the pre-backward, hooks of the first forward serve the recomputed one.
        calls.append(None)
    else:
        # A recomputed forward has a graph and a record of its own.
        call = UnitForward(state, GradientOrder() if recomputing else context.tape)
        if searches.scans or searches.kept_at:
            call.since = sequence_number()
        calls.append(call)
        replaced = _alias_inputs(call, args, kwargs, copies) or replaced
    if not copies:
        return replaced
    return record_copies(handle, copies, (args, kwargs), replaced)


def _look_for_writes(state: _FSDPState, module: nn.Module) -> None:
    """Begin to find writes through ``.data`` in this forward; see ``_copy_writes``."""
    handle, searches = state.handle, state.searches
    looks = searches.looks_at(module, is_foreign=bool(handle.running.foreign))
    if looks and handle.form.needs_gather:
        searches.begin_forward(snapshot(handle))
    else:
        searches.before = None


def _alias_inputs(
    call: UnitForward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copies: Copies,
) -> Arguments | None:
    """Replace inputs that require grad by aliases with the hook ``input_done``."""
    # On an alias (``view_as``) of this call alone: a hook on the input's own node would
    # run only after all users of the input.
    nodes: list[Any] = []
    inputs = call.inputs

    def alias(tensor: Tensor) -> Tensor:
        nonlocal inputs
        if not tensor.requires_grad:
            if not tensor.is_inference():
                # Tensors of inference mode have no version counter.
                inputs += ((tensor, tensor._version),)
            return tensor
        view = tensor.view_as(tensor)
        node = view.grad_fn
        assert node is not None
        node.register_hook(call.input_done)
        nodes.append(node)
        # ``+=`` and not ``append``: a method call per input costs host time.
        inputs += ((view, view._version),)
        return view

    if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
        new_args: tuple[Any, ...] = (alias(args[0]),)
        new_kwargs = kwargs
    else:
        new_args = tuple([map_tensors(value, alias, copies) for value in args])
        new_kwargs = {
            key: map_tensors(value, alias, copies) for key, value in kwargs.items()
        }
        # Backward may enter the unit through a tensor that the forward stores in a
        # container of the caller.
        if not _NO_CONTAINERS.issuperset(map(type, (*args, *kwargs.values()))):
            call.held = new_args, new_kwargs
            call.since = sequence_number()
    if not nodes:
        return None
    call.aliases = tuple(nodes)
    return new_args, new_kwargs


def post_forward(
    state: _FSDPState, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Hook the outputs for backward, and reshard unless backward needs the parameters.

    Also runs if the forward raised (``always_call=True``), with ``output`` None.

    Returns: the new output if the output was cast or showed parameters (now copies).
    Raises: PhaseError, if the output is a generator or a coroutine, or an object that
        holds parameters and cannot be rebuilt.
    """
    context, handle, searches = state.context, state.handle, state.searches
    # The pre-forward hook has raised in these two cases; keep that error.
    if context is None or context.summoned is not None:
        return None
    if OPEN:
        end_range("forward", context, handle.full_fqn)
    recomputing, precision, replaced = current_task() != NO_TASK, state.precision, None
    if output is None and sys.exc_info()[0] is not None and not recomputing:
        _after_error(state)
        return None
    if precision is not None and precision.output_dtype is not None:
        output = replaced = cast_floating(output, precision.output_dtype)
    if type(output) is Tensor:
        tensors = [output]
    else:
        if type(output) in _LAZY_OUTPUTS:
            _refuse_lazy_output(state, output)
        tensors = tensors_in(output)
    for tensor in tensors:
        # Check only tensors that can share memory with the full parameters: the result
        # of an operation has a grad_fn and no base.
        if (tensor.grad_fn is None or tensor._base is not None) and is_weight(
            handle, tensor
        ):
            output = replaced = copy_weights(state, output)
            tensors = tensors_in(output)
            break
    # ``was_written``, inlined for speed.
    if (
        tuple(map(version_of, handle.form.placed)) != handle.form.readable
        or searches.acts
        or handle.running.lent
    ):
        try:
            _copy_writes(state)
        except RuntimeError:
            _after_raise(state)
            raise
    running, calls = handle.running, handle.running.calls
    call = calls.pop() if calls else None
    # ``functional_call`` removes its tensors after the call, so put them back first.
    stays_full = running.foreign and not calls and residency.end_functional_call(handle)
    awaited = call is not None and _hook_outputs(
        call, module, tensors, record=not recomputing
    )
    if running.lent and running.lent[-1].depth > len(calls):
        # After ``_hook_outputs``, which needs the aliases of inputs that the output may
        # contain.
        replaced = apply_changes(running.lent.pop(), output)
    if recomputing:
        return replaced
    if state.remaining and not stays_full:
        state.remaining -= {id(module)}
    if context.outermost is state and not calls:
        _end_outermost(context, awaited=awaited)
    if calls or state.remaining:  # an outer call or another module needs the parameters
        return replaced
    phase = BACKWARD_PRE if awaited else IDLE
    if phase not in handle.phase.followers:
        raise illegal_move(handle.name, handle.phase, phase)
    handle.phase = phase
    if (state.settings.reshard_after_forward or not awaited) and not stays_full:
        reshard(context, handle)
    elif handle.residency is UNSHARDED and not stays_full:
        hold_for_backward(handle)
    return replaced


def _end_outermost(context: RuntimeContext, *, awaited: bool) -> None:
    """End the forward of the whole tree; ``awaited`` if a backward can reach it."""
    end_iteration(context)
    if context.prefetched:
        drop_unused(context)
    for log in context.forward_logs:
        log.end()
    if context.marked.offload and not awaited:
        # No backward will wait for the copies to the device, so wait here: an optimizer
        # or the user may overwrite the shards on the host.
        synchronize_copy_stream(context)
    for unit in context.marked.lists:
        if unit.remaining:
            reshard_late_modules(context, unit)


def _refuse_lazy_output(state: _FSDPState, output: Any) -> None:
    """Reshard the unit and refuse an output that would compute after the forward.

    Raises: PhaseError.
    """
    if isinstance(output, (CoroutineType, GeneratorType)):
        output.close()  # else Python warns that the coroutine was never awaited
    _after_raise(state)
    raise PhaseError(
        f"The forward of fully sharded module {state.name} returned a "
        f"{type(output).__name__}, which computes when the unit is sharded again. "
        "Return tensors; a list of them, or a method that computes one result, for "
        "register_forward_method, serves a caller that iterates."
    )


def _hook_outputs(
    call: UnitForward, module: nn.Module, tensors: list[Tensor], *, record: bool
) -> bool:
    """Register ``pre_backward`` on the nodes of the outputs.

    Returns: False if no output has a node, so that no backward can reach this call.
    """
    aliases, call.aliases = call.aliases, ()
    call.aliased = bool(aliases)
    inputs, call.inputs = call.inputs, []
    state = call.state
    # Backward may enter by an input that was changed in place.
    for tensor, version in inputs:
        if tensor._version != version:
            tensors = [*tensors, *written_in_place(inputs, first_number(aliases))]
            break
    if state.searches.scans or state.searches.kept_at:
        tensors = [*tensors, *tensors_on_attributes(state, module, call.since)]
    if call.held is not None:
        tensors = [*tensors, *made_since(tensors_in(call.held), call.since)]
        call.held = None
    if len(tensors) == 1 and tensors[0]._base is None:
        node = tensors[0].grad_fn
        nodes = [] if node is None else [node]
    else:
        nodes = grad_fns_of(tensors, first_number(aliases))
    if not nodes:
        nodes = grad_fns_of(below_transforms(tensors), first_number(aliases))
    if not nodes:
        return False
    if len(aliases) == 1:
        counted: tuple[Any, ...] = ()
    else:
        # A hook must not hold the node that the hook is registered on (an alias that is
        # also an output): the reference cycle would keep the graph alive.
        others = [a for a in aliases if all(a is not node for node in nodes)]
        counted = tuple(others) if len(others) > 1 else ()
    hook = partial(pre_backward, call, counted)
    for node in nodes:
        node.register_prehook(hook)
    for tensor in tensors:
        base = tensor._base
        for each in (tensor,) if base is None else (tensor, base):
            if each._backward_hooks:
                # Tensor hooks run before node hooks, in the order of registration. A
                # user's hook on an output, or on the base of an output, may read the
                # parameters, so put ``pre_backward`` first.
                hooks = dict(each._backward_hooks)
                each._backward_hooks.clear()
                each._backward_hooks.update({FSDP_HOOK_KEY: hook, **hooks})
    handle = state.handle
    if record:
        call.index = call.tape.record(state, call.begin)
    # Without an alias no ``input_done`` counts this call down, as intended: the
    # gradient may flow to an attribute or a closure until the graph task ends.
    calls = call.tape.open_calls
    calls[handle] = calls.get(handle, 0) + 1
    return True


def _copy_writes(state: _FSDPState) -> None:
    """Copy what the forward wrote to parameters and inputs, or keeps of parameters.

    Raises: PhaseError, as ``copy_writes_to_shards``; RuntimeError, as
        ``write_casts_back``.
    """
    context, handle, searches = state.context, state.handle, state.searches
    assert context is not None
    write_casts_back(handle)
    # Writes through ``.data`` leave the version counter unchanged. Two forwards compare
    # all values; if either finds a write, every later forward copies all parameters.
    if searches.before is not None and len(handle.running.calls) == 1:
        searches.writes_data |= not is_unchanged(handle, searches.before)
        searches.weights_at = find_kept_weights(state)
        searches.end_forward()
    copy_kept_weights(state)
    in_place = was_written(handle)
    if not in_place and not searches.writes_data:
        return
    before = handle.writes.gathered_at
    was_current = before and before == shard_versions(handle)
    if in_place:
        copy_writes_to_shards(handle)
    if searches.writes_data:
        copy_all_to_shards(handle)
    if was_current:
        # The shards changed to what the full parameters are.
        handle.writes.gathered_at = shard_versions(handle)
    # The gather stream may gather this unit again in the same forward.
    context.streams.wait_for_caller()


def _inside_block(state: _FSDPState, block: str) -> PhaseError:
    """Return the error of a forward inside ``unshard_params`` of the unit ``block``."""
    return PhaseError(
        f"Forward of fully sharded module {state.name} was called inside "
        f"unshard_params of {block}, where the parameters are yours to change. Call it "
        "after the block: a forward gathers by itself, and "
        "register_forward_method(module, name) has another method do so."
    )


def _after_error(state: _FSDPState) -> None:
    """Reset as ``_after_raise``; the error of the forward is the error to raise."""
    # Not that of a prefetched all-gather.
    with suppress(RuntimeError):
        _after_raise(state)


def _after_raise(state: _FSDPState) -> None:
    """Reset the unit, or the whole tree if outermost, after the forward raised."""
    context, handle = state.context, state.handle
    assert context is not None
    if runs_elsewhere(context):
        return  # this call was refused before it began
    if handle.residency is UNSHARDED and handle.form.readable is not None:
        # In-place writes before the error stay, as in a plain module. The user's error
        # matters more than a refusal of the write.
        with suppress(RuntimeError):
            _copy_writes(state)
    state.searches.end_forward()
    running, calls = handle.running, handle.running.calls
    if calls:
        call = calls.pop()
        if call is not None:
            call.forget_inputs()
        if running.lent and running.lent[-1].depth > len(calls):
            apply_changes(running.lent.pop(), None)
    if context.outermost is state and not calls:
        recover(context, drop_gradients=False)
    elif not calls:
        # A caller may catch the error, and an earlier call may wait for its backward.
        awaited = handle in context.tape.open_calls
        handle.phase = BACKWARD_PRE if awaited else IDLE
        state.remaining = frozenset()
        if not (running.foreign and residency.end_functional_call(handle)):
            reshard(context, handle)
