"""Casts of the values that enter and leave a forward (``MixedPrecision``)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.features.passages.containers import (
    Change,
    Given,
    map_tensors,
    tensors_in,
)
from composable_fsdp.runtime.backward import Arguments
from composable_fsdp.tree.state import _FSDPState

_disable_dynamo: Any = vars(torch)["_disable_dynamo"]


def _is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the cast to ``dtype`` changes the tensor."""
    return tensor.is_floating_point() and tensor.dtype != dtype


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with floating point tensors cast to ``dtype``, at any depth."""
    return map_tensors(value, lambda t: t.to(dtype) if _is_cast(t, dtype) else t)


def _casting(given: Given, dtype: torch.dtype) -> Change:
    """Return a cast to ``dtype`` that notes the copies in ``given``."""

    def cast(tensor: Tensor) -> Tensor:
        if not _is_cast(tensor, dtype):
            return tensor
        # A tensor of inference mode would have no version counter.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                made = tensor.to(dtype)
        else:
            made = tensor.to(dtype)
        given.casts.append((tensor, made, made._version))
        return made

    return cast


def input_dtype(state: _FSDPState) -> torch.dtype | None:
    """Return the dtype to which the unit casts inputs, if it does."""
    made = state.precision
    if made is None:
        return None
    return made.root_input_dtype if state._is_root else made.input_dtype


def cast_inputs(state: _FSDPState, given: Given, arguments: Arguments) -> Arguments:
    """Return the arguments with floating point tensors cast, if the unit casts them."""
    dtype = input_dtype(state)
    if dtype is None:
        return arguments
    return given.replace(arguments, _casting(given, dtype))


# Input dtypes of modules that keep full precision, during their forward.
_GIVEN: weakref.WeakKeyDictionary[nn.Module, torch.dtype] = weakref.WeakKeyDictionary()


def keep_full_precision(module: nn.Module) -> None:
    """Cast inputs of ``module`` to its own dtype, and outputs to that of the inputs."""
    raise_inputs = _disable_dynamo(_raise_inputs)
    # ``prepend``: hooks of the user should see the inputs that the forward gets.
    module.register_forward_pre_hook(raise_inputs, prepend=True, with_kwargs=True)
    module.register_forward_hook(_disable_dynamo(_lower_outputs))


def _raise_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    found = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    if not found:
        _GIVEN.pop(module, None)
        return None
    _GIVEN[module] = found[0].dtype
    own = (p.dtype for p in module.parameters() if p.is_floating_point())
    raised: Arguments = cast_floating((args, kwargs), next(own, torch.float32))
    return raised


def _lower_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    dtype = _GIVEN.pop(module, None)
    return None if dtype is None else cast_floating(output, dtype)
