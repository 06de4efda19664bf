"""Tensors that leave the forward of a unit: other than by the output, or as weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from composable_fsdp.compose.registry import REGISTRY_KEY
from composable_fsdp.errors import PhaseError
from composable_fsdp.features.passages.containers import map_tensors, tensors_in
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.planning import walk
from composable_fsdp.runtime.forward import is_weight
from composable_fsdp.tree.state import _FSDPState

_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped
_unpack_dual: Callable[[Tensor], Any] = forward_ad.unpack_dual
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {REGISTRY_KEY}
"""Attributes that are not searched; the registry would lead to the whole tree."""
_HOLDERS = frozenset({Tensor, list, tuple, dict})
Place = tuple[dict[str, Any], str]
"""An attribute: the ``__dict__`` or the buffers of a module, and the key."""


def below_transforms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tangents and the tensors below the wrappers of ``torch.func``."""
    found: list[Tensor] = []
    for tensor in tensors:
        if not _is_wrapped(tensor):
            continue
        tangent = _unpack_dual(tensor).tangent
        levels = [tensor] if tangent is None else [tensor, tangent]
        found += levels[1:]
        for each in levels:
            while _is_wrapped(each):
                each = _unwrapped(each)
                found.append(each)
    return found


def written_in_place(inputs: Iterable[tuple[Tensor, int]], since: int) -> list[Tensor]:
    """Return the inputs, or their bases, that the forward changed in place."""
    changed = [
        tensor if tensor._base is None else tensor._base
        for tensor, version in inputs
        if tensor._version != version
    ]
    return made_since(changed, since)


def made_since(tensors: Iterable[Tensor], since: int) -> list[Tensor]:
    """Return the tensors whose node has at least the sequence number ``since``."""
    return [
        tensor
        for tensor in tensors
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since
    ]


def _attributes(state: _FSDPState) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield dict, key and tensor for attributes of this unit and of nested units."""
    # Nested units are included: a tensor that a nested unit keeps was computed from
    # outputs of this unit, and may be the only way back to this unit. By id, because a
    # module class may define ``__eq__``.
    found: Iterable[nn.Module] = walk.modules(state.module)
    if len(state.modules) > 1:
        every = {id(m): m for top in state.modules for m in walk.modules(top)}
        found = every.values()
    for module in found:
        # Not ``vars``, which is one more call per module.
        own = module.__dict__
        buffers = own["_buffers"]
        # Most modules have no buffers.
        for table in (own, buffers) if buffers else (own,):
            # Few keys are left for Python to look at.
            for key in filterfalse(_OF_EVERY_MODULE.__contains__, table):
                value = table[key]
                if type(value) in _HOLDERS:
                    for tensor in tensors_in(value):
                        yield table, key, tensor
                        if tensor.grad_fn is not None:
                            break


def find_places(
    state: _FSDPState, since: int, known: tuple[Place, ...]
) -> tuple[Place, ...]:
    """Return ``known`` and the attributes with views of weights or tensors of now."""
    found = {(id(table), key): (table, key) for table, key in known}
    for table, key, tensor in _attributes(state):
        if made_since([tensor], since) or _is_view(state.handle, tensor):
            found[id(table), key] = table, key
    return tuple(found.values())


def _is_view(handle: FlatParamHandle, tensor: Tensor) -> bool:
    """Return whether ``tensor`` views the full parameters and is none of them."""
    # A parameter itself has memory again in each forward, with the values of the time.
    # ``nn.LSTM`` keeps a list of its parameters, and would compute with old copies.
    own = map(id, handle.form.placed)
    return is_weight(handle, tensor) and id(tensor) not in own


def copy_weights(state: _FSDPState, output: Any) -> tuple[Any, list[Tensor]]:
    """Return ``output`` with copies of full parameters, and the tensors in it."""
    handle, tensors = state.handle, tensors_in(output)
    # The result of an operation with a graph is no weight.
    if not any(
        is_weight(handle, tensor)
        for tensor in tensors
        if tensor.grad_fn is None or tensor._base is not None
    ):
        return output, tensors
    # Gradients flow through ``clone`` to the parameter.
    output = map_tensors(output, lambda t: t.clone() if is_weight(handle, t) else t)
    tensors = tensors_in(output)
    if any(is_weight(handle, tensor) for tensor in tensors):
        raise PhaseError(
            f"The forward of fully sharded module {state.name} returned its own weight "
            f"inside a {type(output).__name__}, and its memory is freed now. Return "
            "weight.clone(), or a tuple, a dict or a dataclass."
        )
    return output, tensors


def copy_kept_weights(handle: FlatParamHandle, places: Iterable[Place]) -> None:
    """Replace views of weights on the noted attributes by copies."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.clone() if _is_view(handle, tensor) else tensor

    for table, key in places:
        value = table.get(key)
        if any(_is_view(handle, tensor) for tensor in tensors_in(value)):
            # What cannot be rebuilt stays: no error, as nobody may read it.
            copied = map_tensors(value, own)
            # The user may hold the container as well.
            if type(value) is list:
                value[:] = copied
            elif type(value) is dict:
                value.update(copied)
            else:
                table[key] = copied
