"""Forward of a unit: functions that the hooks of the modules call.

Each call has one whole passage, which says how values enter and leave; ``PLAIN`` hands
a call that needs more on to those of ``features.passages``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from composable_fsdp.comm.operations import OPEN, begin_range, end_range, profiler
from composable_fsdp.flat import residency
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.residency import (
    NOT_GATHERED,
    UNSHARDED,
    foreign_place,
)
from composable_fsdp.phases import BACKWARD_PRE, FORWARD, IDLE
from composable_fsdp.runtime.backward import (
    Arguments,
    UnitForward,
    hook_outputs,
)
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.runtime.graph_task import (
    FSDP_HOOK_KEY,
    current_task,
    runs_elsewhere,
)
from composable_fsdp.runtime.offload import synchronize_copy_stream
from composable_fsdp.runtime.recover import (
    begin_iteration,
    end_iteration,
    is_live,
    mode_of,
    recover,
    require_outside_block,
)
from composable_fsdp.runtime.unshard import (
    drop_unused,
    prefetch_forward,
    reshard,
    unshard,
    wait_unsharded,
)
from composable_fsdp.tree.moments import PASSAGES
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

Left = tuple[Any, list[Tensor]]
"""An output, and the tensors through which a backward may enter the unit."""
NO_CONTAINERS = frozenset({Tensor, nn.Parameter, bool, int, float, str, type(None)})
"""Types of arguments into which a forward cannot put a tensor."""


class Passage:
    """The passage of tensors and tuples of tensors."""

    __slots__ = ()

    def without_graph(self, state: _FSDPState) -> Passage:
        """Return the passage of a forward without a graph."""
        return QUIET

    def enter(
        self, call: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Return new ``(args, kwargs)`` with aliases if an input requires grad."""
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            alias = call.alias(args[0])
            return None if alias is args[0] else ((alias,), kwargs)
        for value in (*args, *kwargs.values()):
            items = value if type(value) is tuple else (value,)
            if not NO_CONTAINERS.issuperset(map(type, items)):
                call.passage = PASSAGES["full"]
                replaced: Arguments | None = call.passage.enter(call, args, kwargs)
                return replaced
        made = tuple([_alias(call, value) for value in args])
        named = {key: _alias(call, value) for key, value in kwargs.items()}
        return (made, named) if call.aliases else None

    def leave(self, state: _FSDPState, call: UnitForward, output: Any) -> Left:
        """Return the output, and the tensors by which backward may enter the unit."""
        handle = state.handle
        if type(output) is Tensor:
            tensors = [output]
        elif type(output) is tuple and NO_CONTAINERS.issuperset(map(type, output)):
            tensors = [each for each in output if isinstance(each, Tensor)]
        else:
            return _leave_wider(state, call, output)
        for tensor in tensors:
            # Check only tensors that can share memory with the full parameters: the
            # result of an operation has a grad_fn and no base.
            if (tensor.grad_fn is None or tensor._base is not None) and is_weight(
                handle, tensor
            ):
                return _leave_wider(state, call, output)
        # A parameter or an input was written to in place.
        form = handle.form
        if tuple([leaf._version for leaf in form.placed]) != form.readable:
            return _leave_wider(state, call, output)
        for tensor, version in call.inputs:
            if tensor._version != version:
                return _leave_wider(state, call, output)
        return output, tensors


class QuietPassage(Passage):
    """The passage and the call of all forwards without a graph: nothing to remember."""

    __slots__ = ()
    has_graph, inputs, aliases, given = False, (), (), None
    passage: ClassVar[Passage]

    def enter(self, *_: object) -> None:
        """Leave the arguments as they are."""

    def forget_inputs(self) -> None:
        """Do nothing: the call holds no inputs."""


PLAIN, QUIET = Passage(), QuietPassage()
QuietPassage.passage = QUIET


def _alias(call: UnitForward, value: Any) -> Any:
    """Return the argument with aliases of the tensors that require grad."""
    if type(value) is tuple:
        return tuple([_alias(call, each) for each in value])
    return call.alias(value) if isinstance(value, Tensor) else value


def _leave_wider(state: _FSDPState, call: UnitForward, output: Any) -> Left:
    """Return what ``leave`` of the passage of everything returns."""
    left: Left = PASSAGES["full"].leave(state, call, output)
    return left


def is_weight(handle: FlatParamHandle, tensor: Tensor) -> bool:
    """Return whether ``tensor`` shares memory with the full parameters."""
    try:
        memory = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False  # sparse or batched tensors have no storage
    return any(memory == f.untyped_storage()._cdata for f in handle.form.fulls)


def pre_forward(
    state: _FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Unshard the unit before its forward; return new arguments if one was replaced.

    Raises: PhaseError, in ``unshard_params``; DesyncError, if ranks run other units.
    Collective: the all-gather of the unit, unless unsharded, and of prefetched units.
    """
    context = state.context or ensure_root(state)
    handle, passage = state.handle, state.passage
    recomputing = current_task() != NO_TASK
    # Before the all-gather, whose range lies inside.
    if profiler._is_profiler_enabled:
        begin_range("forward", context, handle.full_fqn)
    if not recomputing:
        if context.entered is None or context.entered is state:
            passage = _enter_outermost(context, state)
        log = handle.logs.forward
        if log is not None:
            # Compare before any collective is issued, so that ranks that disagree can
            # raise.
            if log.expected[log.position] is handle:
                log.position += 1
            else:
                log.depart(handle, mode_of(context, handle))
    else:
        require_outside_block(context, state)
    if handle.residency in NOT_GATHERED:
        unshard(context, handle)
    elif handle.residency is UNSHARDED and not (recomputing or handle.calls):
        residency.refuse_foreign(handle)  # ``use_full`` will not run
    if state.settings.prefetches_forward and not recomputing:
        prefetch_forward(context, state)
    call = _begin_call(state, module, passage, recomputing=recomputing)
    # Before the wait: the host works while the all-gather runs, and on CUDA the casts
    # come before the wait in the stream.
    replaced: Arguments | None = call.passage.enter(call, args, kwargs)
    if handle.residency is not UNSHARDED:
        wait_unsharded(handle)
    return replaced


def _enter_outermost(context: RuntimeContext, state: _FSDPState) -> Passage:
    """Begin the iteration, unless this is an inner call of a running forward of it."""
    # ``entered`` may be stale after a KeyboardInterrupt: ``is_live`` asks the call
    # stack.
    passage: Passage = state.passage
    if context.entered is not None and is_live(context):
        return passage
    begin_iteration(context, state)
    return passage if context.streams.host_waits else PASSAGES["moving"]


def _begin_call(
    state: _FSDPState, module: nn.Module, passage: Passage, *, recomputing: bool
) -> Any:
    """Add a call to the running forwards of the unit; ``post_forward`` removes it."""
    context, handle = state.context, state.handle
    assert context is not None
    if not recomputing:
        handle.phase = FORWARD
    # After the pre-backward, hooks of the first forward serve the recomputed one.
    has_graph = torch.is_grad_enabled() and not (
        recomputing and handle.backward.task != NO_TASK
    )
    if not has_graph:
        passage = passage if passage is PLAIN else passage.without_graph(state)
        passage = QUIET if passage is PLAIN else passage
    call: UnitForward | QuietPassage = QUIET
    if passage is not QUIET:
        # A recomputed forward has a graph and an order of its own.
        order = context.order.recomputed() if recomputing else context.order
        call = UnitForward(
            state, module, order, passage, has_graph, order.count, handle.form
        )
    handle.calls.append(call)
    return call


def post_forward(
    state: _FSDPState, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Hook the outputs for backward, and reshard; ``output`` is None after a raise."""
    context, handle = state.context, state.handle
    calls = handle.calls
    recomputing = current_task() != NO_TASK
    if OPEN:
        end_range("forward", context, handle.full_fqn)
    if context is None or not calls or (output is None and _raised(recomputing)):
        _after_error(state)
        return None
    call = calls[-1]
    try:
        output, tensors = call.passage.leave(state, call, output)
    except BaseException:
        _after_raise(state)
        raise
    calls.pop()
    awaited = call.has_graph and hook_outputs(call, tensors, adds=not recomputing)
    if recomputing:
        return output
    if state.remaining:
        state.remaining -= {id(module)}
    if context.entered is state and not calls:
        _end_outermost(context, awaited=awaited)
    # An outer call or another module may need the parameters.
    if not calls and not state.remaining:
        end_unit_forward(context, state, awaited=awaited)
    return output


def end_unit_forward(
    context: RuntimeContext, state: _FSDPState, *, awaited: bool
) -> None:
    """Reshard the unit, unless its backward needs it full."""
    handle = state.handle
    handle.phase = BACKWARD_PRE if awaited else IDLE
    if state.settings.reshard_after_forward or not awaited:
        reshard(context, handle)
    elif handle.residency is UNSHARDED:
        residency.use_sharded(handle)
        handle.kept_for_forward = False


def _end_outermost(context: RuntimeContext, *, awaited: bool) -> None:
    """End the forward of the whole tree; ``awaited`` if a backward can reach it."""
    end_iteration(context)
    if context.prefetched:
        drop_unused(context)
    for log in context.forward_logs:
        log.end()
    if context.offload and not awaited:
        # No backward will wait for the copies to the device, so wait here: an optimizer
        # or the user may overwrite the shards on the host.
        synchronize_copy_stream(context)
    for unit in context.lists:
        if unit.remaining:
            unit.remaining = frozenset()
            # Some of its modules did not run, or ran again after the reshard.
            awaited = unit.handle in context.order.graphs
            end_unit_forward(context, unit, awaited=awaited)


def _raised(recomputing: bool) -> bool:
    """Return whether the forward without an output has raised."""
    error = sys.exc_info()[1]
    # Checkpointing ends a recomputation early by an error of its own.
    if recomputing or error is None or error.__traceback__ is None:
        return False
    # The handler is that of torch's call of the module, and not one of the user inside
    # of which the module was called.
    return "_call_impl" in error.__traceback__.tb_frame.f_code.co_name


def _after_error(state: _FSDPState) -> None:
    """Reset as ``_after_raise``; the error of the forward is the error to raise."""
    context = state.context
    # Not if the pre-forward hook has refused the call before it began. The end of a
    # backward that raised resets the units of a recomputation.
    if context is not None and context.summoned is None and current_task() == NO_TASK:
        # Not that of a prefetched all-gather.
        with suppress(RuntimeError):
            _after_raise(state)


def _after_raise(state: _FSDPState) -> None:
    """Reset the unit, or the whole tree if outermost, after the forward raised."""
    context, handle = state.context, state.handle
    assert context is not None
    if runs_elsewhere(context):
        return  # this call was refused before it began
    calls = handle.calls
    if calls:
        call = calls[-1]
        PASSAGES["full"].after_raise(state, call)
        calls.pop()
        call.forget_inputs()
    if context.entered is state and not calls:
        recover(context, drop_gradients=False)
    elif not calls:
        # A caller may catch the error, and an earlier call may wait for its backward.
        awaited = handle in context.order.graphs
        handle.phase = BACKWARD_PRE if awaited else IDLE
        state.remaining = frozenset()
        # A call that ``refuse_foreign`` refused leaves a full unit as it is.
        if handle.residency is not UNSHARDED or foreign_place(handle) is None:
            reshard(context, handle)


# torch.compile neither traces a forward hook nor what it calls, so a compiled block
# stays a single graph. The effect of ``torch.compiler.disable`` without its wrapper,
# which took a dozen calls per hook and imported dynamo (checked on torch 2.13).
for _hook in (pre_forward, post_forward):
    _skip = eval_frame._FrameAction.SKIP
    _whole = eval_frame._FrameExecStrategy(_skip, _skip)
    eval_frame.set_code_exec_strategy(_hook.__code__, _whole)
    vars(_hook)["_torchdynamo_disable"] = True


def install_hooks(state: _FSDPState) -> None:
    """Register the forward hooks of the unit's modules and the hooks for gradients."""
    before, after = MethodType(pre_forward, state), MethodType(post_forward, state)
    # The effect of ``register_forward_pre_hook(prepend=True, with_kwargs=True)`` and
    # ``register_forward_hook(always_call=True)``, without their handles, which took
    # most of the time and have no use here (checked on torch 2.13 and 2.11).
    for module in state.modules:
        pre_hooks: Any = module._forward_pre_hooks
        pre_hooks[FSDP_HOOK_KEY] = before
        # Move the hook to the front: pre-hooks of the user see full parameters.
        pre_hooks.move_to_end(FSDP_HOOK_KEY, last=False)
        module._forward_pre_hooks_with_kwargs[FSDP_HOOK_KEY] = True
        module._forward_hooks[FSDP_HOOK_KEY] = after
        module._forward_hooks_always_called[FSDP_HOOK_KEY] = True
    install_grad_hooks(state)


def call_method(
    state: _FSDPState,
    module: nn.Module,
    method: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``method`` as if it were the forward of the unit's ``module``."""
    try:
        changed = pre_forward(state, module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = method(*args, **kwargs)
    except BaseException:
        # Inside ``except``, so that ``post_forward`` finds the exception in
        # ``sys.exc_info``.
        post_forward(state, module, args, None)
        raise
    replaced = post_forward(state, module, args, output)
    return output if replaced is None else replaced
