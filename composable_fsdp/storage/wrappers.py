"""Stores tensors that wrap others, such as quantized weights, by their inner tensors.

A class with ``__tensor_flatten__`` names the attributes that hold its tensors. A
checkpoint has these tensors, each under the name of the wrapper and the attribute, and
a text with the class and the other facts, which a load compares::

    layer.weight              a torchao tensor, int8 by rows
    layer.weight.qdata        int8 (64, 32)
    layer.weight.scale        float32 (64,)

A load fills the inner tensors of the model's own wrapper.
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
    """Raise CheckpointError for a tensor without values in memory of its own."""
    kind = type(tensor)
    # Read by this rank's part, which is a tensor of its own.
    tensor = local_of(tensor)
    # A tensor that wraps others has no address: a read of the memory would end the
    # process by a signal.
    if is_wrapper(tensor) or _has_no_memory(tensor):
        raise CheckpointError(
            f"{quoted(name)} is a {kind.__module__}.{kind.__qualname__}, which wraps "
            f"other tensors; {what} expects plain tensors, and did nothing. Pass a "
            "module without it, and save it apart, by torch.distributed.checkpoint."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        form = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise CheckpointError(
            f"{quoted(name)} is {form}; {what} expects dense tensors, and did nothing. "
            "Convert it (to_dense(), dequantize()), or leave it out."
        )
    require_memory(tensor, name, what)


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
    last = tensor.storage_offset()
    if tensor.is_contiguous():  # as most are
        last += numel - 1
    else:
        # For any strides: none is negative.
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        last += sum((size - 1) * stride for size, stride in pairs)
    nbytes = tensor.untyped_storage().nbytes()
    # A read behind the end, or of no address, would end the process by a signal.
    if nbytes <= last * tensor.element_size():
        raise CheckpointError(
            f"{quoted(name)} has {numel} elements, and its storage was "
            f"resized to {nbytes} bytes; {what} expects tensors with memory, and did "
            "nothing. Resize the storage and set the values, or leave the tensor out."
        )


@dataclass(frozen=True, slots=True)
class HeldWrapper:
    """A tensor of a module that wraps others; ``tensor`` is the wrapper itself."""

    name: str
    tensor: Tensor
    facts: str
    """The class, the shape and the other facts that a load compares."""


class Wrappers:
    """Opens the tensors of a module that wrap others, and notes them."""

    def __init__(self, what: str, *, allowed: bool) -> None:
        self._what, self._allowed = what, allowed
        self.found: list[HeldWrapper] = []
        # id(inner tensor) -> the tensor that the module holds.
        self.around: dict[int, Tensor] = {}

    def opened(self, tensor: Tensor, name: str) -> list[tuple[str, Tensor]]:
        """Return the tensors with memory in ``tensor``, with names."""
        if not self._allowed or not is_wrapper(tensor):
            return [(name, tensor)]
        self.found.append(HeldWrapper(name, tensor, facts_of(tensor)))
        opened = []
        # A tensor in a wrapper may be a wrapper again.
        for inner_name, inner in inner_tensors(tensor, name, self._what):
            self.around[id(inner)] = tensor
            for told, each in self.opened(inner, inner_name):
                self.around[id(each)] = tensor
                opened.append((told, each))
        return opened


def inner_tensors(wrapper: Tensor, name: str, what: str) -> Iterator[tuple[str, Any]]:
    """Yield the inner tensors of a wrapper, with names."""
    given: Any = wrapper
    for key in given.__tensor_flatten__()[0]:
        inner = getattr(given, key)
        # A load would fill a tensor that the wrapper forgets.
        if inner is not getattr(given, key):
            raise CheckpointError(
                f"{quoted(name)} is a {kind_of(wrapper)}, which makes its tensor "
                f"{key!r} anew when asked; {what} expects tensors that the wrapper "
                "holds, and did nothing. Pass a module without the tensor."
            )
        yield f"{name}.{key}", inner


def facts_of(wrapper: Tensor) -> str:
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
