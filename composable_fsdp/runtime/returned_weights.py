"""What a forward returns, or keeps on attributes, of the unit's full parameters.

Their memory is freed after the forward, so outputs and attributes that share it become
copies.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime.escaped_tensors import attributes
from composable_fsdp.runtime.nested_tensors import map_tensors, tensors_in
from composable_fsdp.tree.state import _FSDPState

Place = tuple[dict[str, Any], str]
"""An attribute: the ``__dict__`` or the buffers of a module, and the key."""


def is_weight(handle: FlatParamHandle, tensor: Tensor) -> bool:
    """Return whether ``tensor`` shares memory with the full parameters."""
    try:
        memory = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False  # sparse or batched tensors have no storage
    return any(memory == f.untyped_storage()._cdata for f in handle.form.fulls)


def _is_view(handle: FlatParamHandle, tensor: Tensor) -> bool:
    """Return whether ``tensor`` views the full parameters and is none of them."""
    # A parameter itself has memory again in each forward, with the values of the time.
    # ``nn.LSTM`` keeps a list of its parameters, and would compute with old copies.
    return is_weight(handle, tensor) and all(
        tensor is not leaf for leaf in handle.form.placed
    )


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


def find_kept_weights(state: _FSDPState) -> tuple[Place, ...]:
    """Return the attributes of the unit's modules that ever viewed weights."""
    found = {(id(table), key): (table, key) for table, key in state.searches.weights_at}
    for table, key, tensor in attributes(state):
        if _is_view(state.handle, tensor):
            found[id(table), key] = table, key
    return tuple(found.values())


def copy_kept_weights(state: _FSDPState) -> None:
    """Replace views of weights on the noted attributes by copies."""
    for table, key in state.searches.weights_at:
        value = table.get(key)
        if any(_is_view(state.handle, tensor) for tensor in tensors_in(value)):
            # What cannot be rebuilt stays: no error, as nobody may read it.
            copied = map_tensors(
                value, lambda t: t.clone() if _is_view(state.handle, t) else t
            )
            # The user may hold the container as well.
            if type(value) is list:
                value[:] = copied
            elif type(value) is dict:
                value.update(copied)
            else:
                table[key] = copied
