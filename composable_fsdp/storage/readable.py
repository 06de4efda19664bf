"""Refuses tensors whose memory holds no plain values."""

from __future__ import annotations

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
