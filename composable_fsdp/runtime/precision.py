"""The full form of a forward and its backward, and casts of buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from composable_fsdp.flat.build import switch_form
from composable_fsdp.flat.handle import NO_TASK, FullForm
from composable_fsdp.naming import TRANSPARENT, join_name
from composable_fsdp.planning.walk import named
from composable_fsdp.runtime.backward import earlier_forward
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.runtime.unshard import release
from composable_fsdp.tree.state import OWNERS, RuntimeContext, _FSDPState


def select_form(state: _FSDPState, form: FullForm) -> None:
    """Make ``form``, whose full leaves a graph holds, the current form of the unit."""
    if form is not state.handle.other_form:
        raise earlier_forward(f"unit {state.name}")
    assert state.context is not None
    select_full_form(state.context, state, wide=form.full_precision)


def select_full_form(context: RuntimeContext, state: _FSDPState, *, wide: bool) -> None:
    """Switch the unit to the full form in the parameters' own or the compute dtype."""
    handle = state.handle
    if handle.form.full_precision is wide:
        return
    release(context, handle)
    if switch_form(handle):
        install_grad_hooks(state)


def select_forward_form(
    context: RuntimeContext, state: _FSDPState, module: nn.Module
) -> None:
    """Select the full form of this forward, before the unit is unsharded."""
    precision, handle = state.precision, state.handle
    assert precision is not None
    # A forward that is recomputed inside backward uses the form of that backward.
    wide = not handle.form.full_precision
    if handle.backward.task == NO_TASK and precision.wide(module) is wide:
        select_full_form(context, state, wide=wide)


def cast_buffers(state: _FSDPState) -> None:
    """Cast the unit's floating point buffers to the dtype of this forward, in place."""
    precision = state.precision
    assert precision is not None
    assert precision.buffer_dtype is not None
    wide = precision.wide(state.module)
    known = precision.buffer_dtypes
    # By id, because a shared buffer is cast under the first of its names.
    just_cast: dict[int, torch.dtype] = {}
    for number, fqn, buffer in own_buffers(state):
        # Two modules of the unit may have buffers of the same name.
        name = number, fqn
        if not buffer.is_floating_point():
            continue
        if wide:
            dtype = known.get(name, buffer.dtype)
        else:
            dtype = precision.buffer_dtype
            if buffer.dtype != dtype:
                known[name] = just_cast[id(buffer)] = buffer.dtype
            elif just_cast and id(buffer) in just_cast:
                known[name] = just_cast[id(buffer)]
        if buffer.dtype != dtype:
            # ``.data``: the buffer object stays the same.
            buffer.data = buffer.to(dtype)


def own_buffers(state: _FSDPState) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the unit's module, by number, the name from there, and the buffer."""

    def enter(module: nn.Module) -> bool:
        owner = OWNERS.get(module)
        # An activation checkpoint wrapper that was inserted after ``fully_shard`` has
        # no owner; the wrapped module may belong to this unit.
        return owner is state or (
            owner is None and any(name in module._modules for name in TRANSPARENT)
        )

    for number, root in enumerate(state.modules):
        for fqn, module in named(root, enter=enter, every_path=True):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield number, join_name(fqn, name), buffer
