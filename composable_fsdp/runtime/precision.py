"""Casts of the inputs, the outputs and the buffers of a unit.

``flat.precision`` says to which dtypes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.flat.handle import NO_TASK
from composable_fsdp.naming import TRANSPARENT, join_name, listed
from composable_fsdp.planning.walk import named
from composable_fsdp.runtime.backward import select_full_form
from composable_fsdp.runtime.container_copies import Arguments, CastInput, Copies
from composable_fsdp.runtime.nested_tensors import map_tensors, tensors_in
from composable_fsdp.tree.state import OWNERS, RuntimeContext, _FSDPState

_disable_dynamo: Any = vars(torch)["_disable_dynamo"]


def cast_floating(value: Any, dtype: torch.dtype, copies: Copies | None = None) -> Any:
    """Return ``value`` with floating point tensors cast to ``dtype``, at any depth.

    Returns: ``value`` itself if no tensor changes.
    """

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if copies is None:
            return tensor.to(dtype)
        # A tensor of inference mode would have no version counter.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                made = tensor.to(dtype)
        else:
            made = tensor.to(dtype)
        copies.append(CastInput(tensor, made, made._version))
        return made

    return map_tensors(value, cast, copies)


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


def casts_values(state: _FSDPState) -> bool:
    """Return whether forwards of the unit may cast inputs or outputs."""
    made = state.precision
    return made is not None and (_input_dtype(state) or made.output_dtype) is not None


def _input_dtype(state: _FSDPState) -> torch.dtype | None:
    """Return the dtype to which the unit casts inputs."""
    made = state.precision
    assert made is not None
    return made.root_input_dtype if state._is_root else made.input_dtype


def cast_inputs(
    state: _FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies
) -> Arguments | None:
    """Return the arguments with floating point tensors cast; None without casts."""
    precision, dtype = state.precision, _input_dtype(state)
    assert precision is not None
    # In full precision the unit computes in the parameters' own dtype.
    if dtype is None or state.handle.form.full_precision:
        return None
    # In eval mode the unit may be configured to compute in full precision.
    if precision.full_in_eval and not state.module.training:
        return None
    return (
        tuple([cast_floating(value, dtype, copies) for value in args]),
        {key: cast_floating(value, dtype, copies) for key, value in kwargs.items()},
    )


def explain_dtypes(units: Iterable[_FSDPState], error: BaseException | None) -> None:
    """Add to torch's error about dtypes in which dtype each unit computes.

    Only if ``error`` is an error of torch that speaks of dtypes, and the units of the
    tree compute in different dtypes. The class of the error stays.
    """
    text = str(error)
    if type(error) is not RuntimeError or "dtype" not in text or _DTYPES in text:
        return
    found: dict[torch.dtype, list[str]] = {}
    for unit in units:
        mixed = unit.options.mixed_precision
        own = [region.shard.dtype for region in unit.handle.layout.regions]
        if mixed is not None and mixed.param_dtype is not None:
            own = [mixed.param_dtype] if own else []
        for dtype in own[:1]:
            found.setdefault(dtype, []).append(unit.name)
    if len(found) < 2:
        return
    told = "; ".join(f"{listed(names)} in {dtype}" for dtype, names in found.items())
    error.args = (
        f"{text}. {_DTYPES}: {told}. A unit with "
        "MixedPrecision(cast_forward_inputs=True) casts the inputs it is called with, "
        "and output_dtype=... casts what it returns.",
    )


_DTYPES = "composable_fsdp: units compute in different dtypes"


def cast_buffers(state: _FSDPState) -> None:
    """Cast the unit's floating point buffers to the dtype of this forward, in place.

    The tensor objects stay the same, so a buffer that two modules share stays shared.
    """
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
    """Yield the unit's module, by number, the name from there, and the buffer.

    Buffers of nested units are left out.
    """

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


# Input dtypes of modules that keep full precision, during their forward.
_GIVEN: weakref.WeakKeyDictionary[nn.Module, torch.dtype] = weakref.WeakKeyDictionary()


def keep_full_precision(module: nn.Module) -> None:
    """Cast the inputs of ``module`` to the module's own dtype, and the outputs back.

    The own dtype is the dtype of the first floating point parameter, or float32 without
    such a parameter. Outputs get the dtype of the first floating point input; without
    such an input nothing is cast.
    """
    raise_inputs = _disable_dynamo(_raise_inputs)
    # ``prepend``: hooks of the user should see the inputs that the forward gets.
    module.register_forward_pre_hook(raise_inputs, prepend=True, with_kwargs=True)
    module.register_forward_hook(_disable_dynamo(_lower_outputs))


def _raise_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    if not given:
        _GIVEN.pop(module, None)
        return None
    _GIVEN[module] = given[0].dtype
    own = (p.dtype for p in module.parameters() if p.is_floating_point())
    dtype = next(own, torch.float32)
    raised: Arguments = cast_floating((args, kwargs), dtype)
    return raised


def _lower_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    dtype = _GIVEN.pop(module, None)
    return None if dtype is None else cast_floating(output, dtype)
