"""Tells what a tensor is to a checkpoint: its wrappers, its place on meshes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError, PlanError
from composable_fsdp.flat.param_ref import ParamRef
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import is_wrapper as is_wrapper
from composable_fsdp.planning.dtensors import is_dtensor as is_dtensor
from composable_fsdp.planning.dtensors import local_of as local_of
from composable_fsdp.planning.dtensors import refuse_cuts, whole_of
from composable_fsdp.planning.layout import Whole
from composable_fsdp.storage.manifest import Rectangle, Span
from composable_fsdp.storage.writer import require_memory

Groups = Sequence[dist.ProcessGroup]


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group."""
    return tuple(dist.get_process_group_ranks(group))


def others_of(ref: ParamRef) -> Groups:
    """Return the groups with replicas, or with other elements, of a parameter."""
    return (*ref.handle.groups.present, *ref.form.cut_over)


def copies_of(others: Groups, groups: Groups) -> list[tuple[int, ...]]:
    """Return the ranks along each dim of the meshes with copies, without ``others``."""
    if not groups:
        return []
    me = dist.get_rank()
    # Also ranks of experts, whose mesh lies inside of the data ranks of other units.
    apart = {me}.union(*map(ranks_of, others))
    found = map(ranks_of, groups)
    return [ranks for ranks in found if apart.isdisjoint(set(ranks) - {me})]


def is_first_copy(others: Groups, groups: Groups) -> bool:
    """Return whether this rank is the first of those that hold copies."""
    return all(ranks[0] == dist.get_rank() for ranks in copies_of(others, groups))


def span_of(place: Whole | None, shape: Sequence[int], start: int, stop: int) -> Span:
    """Return elements of a tensor as a span of the whole, or else of its rectangle."""
    if place is None:
        return Span(start, stop)
    box = Rectangle(place.shape, place.offset, tuple(shape))
    cut = {dim for _, size, dim in place.axes if dim is not None and size > 1}
    # By the placement and not by this rank's part, which may be a single row.
    if len(cut) > 1 or any(prod(place.shape[:dim]) != 1 for dim in cut):
        return Span(start, stop, box)
    # A rank without rows has an offset behind the end, and no element.
    first = next(box.runs(0, 1))[0] if start < stop else 0
    return Span(first + start, first + stop)


def loose_span(tensor: Tensor, name: str, what: str) -> Span:
    """Return this rank's elements of a tensor in no unit."""
    local = local_of(tensor)
    given: Any = tensor
    if not is_dtensor(tensor):
        return Span(0, local.numel())
    # The rule of ``fully_shard``: all ranks see the same placements, and raise alike.
    try:
        refuse_cuts(tensor, name, f"pass a module without the tensor to {what}")
    except PlanError as error:
        raise CheckpointError(f"{error} Nothing was done.") from None
    if given.device_mesh.get_coordinate() is None:
        return Span(0, 0)
    return span_of(whole_of(tensor), local.shape, 0, local.numel())


def stores_loose(tensor: Tensor, first_rank: int) -> bool:
    """Return whether this rank stores its rectangle of a DTensor in no unit."""
    given: Any = tensor
    at, mesh = given.device_mesh.get_coordinate(), given.device_mesh.mesh
    if at is None or first_rank not in mesh.flatten().tolist():
        return False
    # With more ranks than rows, some hold nothing to store.
    if given.numel() and not local_of(tensor).numel():
        return False
    # An empty tensor has no rectangles to tell apart.
    return all(
        (placement.is_shard() and given.numel()) or not index
        for placement, index in zip(given.placements, at, strict=True)
    )


@torch.no_grad()
def whole_value(tensor: Tensor) -> Tensor:
    """Return a tensor's values; a DTensor's by an all-gather over each dim cut."""
    given: Any = tensor
    if not is_dtensor(tensor) or given.device_mesh.get_coordinate() is None:
        return tensor.detach()
    whole: Tensor = given.full_tensor()
    return whole.detach()


def local_state(value: Tensor, parameter: Tensor, where: str) -> Tensor:
    """Return this rank's part of a state of a DTensor."""
    # A step that all ranks count alike, or the state of a plain parameter.
    if not is_dtensor(value):
        return value
    given: Any = value
    own: Any = parameter
    alike = given.placements == own.placements and given.device_mesh == own.device_mesh
    if not is_dtensor(parameter) or not alike:
        raise CheckpointError(
            f"{quoted(where)} is a DTensor placed as {tuple(given.placements)}; "
            f"expected the placements of the parameter, {tuple(own.placements)}. "
            "Nothing was done. Redistribute the state, or keep plain tensors."
        )
    return local_of(value)


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
    given: Any = tensor
    keys, context = given.__tensor_flatten__()
    # The address of an object is another one in each process. Without the module:
    # libraries move classes from release to release.
    context = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(context))
    kind, shape = type(tensor).__qualname__, tuple(tensor.shape)
    facts = f"{kind} {shape} of {tensor.dtype}, {context}"
    found.append(HeldWrapper(name, tensor, facts))
    for key in keys:
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


def kind_of(tensor: Tensor) -> str:
    """Return the class of a tensor with its module."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
