"""Outputs of a forward that are, or share memory with, the unit's full parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime.nested_tensors import map_tensors, tensors_in
from composable_fsdp.tree.state import _FSDPState


def is_weight(handle: FlatParamHandle, tensor: Tensor) -> bool:
    """Return whether ``tensor`` shares memory with the full parameters."""
    try:
        memory = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False  # sparse or batched tensors have no storage
    return any(memory == f.untyped_storage()._cdata for f in handle.form.fulls)


def copy_weights(state: _FSDPState, output: Any) -> Any:
    """Return ``output`` with copies in place of the unit's full parameters.

    Gradients flow through a copy to the parameter (``clone`` is differentiable).

    Raises: PhaseError, if an object holds a parameter and cannot be rebuilt.
    """
    handle = state.handle
    output = map_tensors(output, lambda t: t.clone() if is_weight(handle, t) else t)
    if any(is_weight(handle, tensor) for tensor in tensors_in(output)):
        raise PhaseError(
            f"The forward of fully sharded module {state.name} returned its own weight "
            f"inside a {type(output).__name__}, and its memory is freed now. Return "
            "weight.clone(), or a tuple, a dict or a dataclass."
        )
    return output
