"""Stores tensors that wrap others, such as quantized weights, by their inner tensors.

A load fills the inner tensors of the model's own wrapper, and compares the other facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.own_state_dict import is_wrapper
from composable_fsdp.planning.dtensors import local_of


def require_readable(tensor: Tensor, name: str, what: str) -> None:
    """Raise CheckpointError for a tensor without dense values in its own memory."""
    kind = kind_of(tensor)
    # Read by this rank's part, which is a tensor of its own.
    tensor = local_of(tensor)
    # There is no address: a read of the memory would end the process by a signal.
    if is_wrapper(tensor) or _has_no_memory(tensor):
        form = f"a {kind}, which wraps other tensors"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        form = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
    else:
        require_memory(tensor, name, what)
        return
    raise CheckpointError(
        f"{quoted(name)} is {form}; {what} expects plain dense tensors, and did "
        "nothing. Convert it (to_dense(), dequantize()), or pass a module without it "
        "and save it apart, by torch.distributed.checkpoint."
    )


def _has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor of another class has elements and no address."""
    if type(tensor) in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return False
    # Past the class's own ``data_ptr``, which may raise or invent an address.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.untyped_storage().data_ptr() == 0
        except RuntimeError:  # torch refuses to tell an address that does not exist
            return True


def require_memory(tensor: Tensor, name: str, what: str) -> None:
    """Raise CheckpointError for a dense tensor whose storage was resized."""
    numel = tensor.numel()
    if tensor.is_meta or not numel:
        return
    # For any strides: none is negative.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in pairs)
    nbytes = tensor.untyped_storage().nbytes()
    # A read behind the end, or of no address, would end the process by a signal.
    if nbytes <= last * tensor.element_size():
        raise CheckpointError(
            f"{quoted(name)} has {numel} elements, and its storage was resized to "
            f"{nbytes} bytes; {what} expects tensors with memory, and did nothing. "
            "Resize the storage and set the values, or leave the tensor out."
        )


@dataclass(frozen=True, slots=True)
class HeldWrapper:
    """A tensor of a module that wraps others; ``tensor`` is the wrapper itself."""

    name: str
    tensor: Tensor
    facts: str
    """The class, the shape and the other facts that a load compares."""


def opened(
    tensor: Tensor, name: str, what: str, found: list[HeldWrapper]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with memory in ``tensor``, with names; note the wrappers."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    found.append(HeldWrapper(name, tensor, _facts_of(tensor)))
    given: Any = tensor
    for key in given.__tensor_flatten__()[0]:
        inner = getattr(given, key)
        # A load would fill a tensor that the wrapper forgets.
        if inner is not getattr(given, key):
            raise CheckpointError(
                f"{quoted(name)} is a {kind_of(tensor)}, which makes its tensor "
                f"{key!r} anew when asked; {what} expects tensors that the wrapper "
                "holds, and did nothing. Pass a module without the tensor."
            )
        # A tensor in a wrapper may be a wrapper again.
        yield from opened(inner, f"{name}.{key}", what, found)


def _facts_of(wrapper: Tensor) -> str:
    """Return the facts of a wrapper that its inner tensors do not tell, as text."""
    given: Any = wrapper
    context = repr(given.__tensor_flatten__()[1])
    # The address of an object is another one in each process.
    context = re.sub(r" at 0x[0-9a-fA-F]+", "", context)
    # Without the module: libraries move classes from release to release.
    kind, shape = type(wrapper).__qualname__, tuple(wrapper.shape)
    return f"{kind} {shape} of {wrapper.dtype}, {context}"


def kind_of(tensor: Tensor) -> str:
    """Return the class of a tensor with its module."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
