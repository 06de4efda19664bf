"""The checks of a plan: each check only reads, and either returns or raises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import (
    is_dtensor,
    local_of,
    refuse_placements,
)


def refuse_container(module: object) -> None:
    """Raise if ``module`` has no forward, because hooks on it would never run."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected a module, got a {type(module).__name__}.")
    refuse_module(module, "")
    if isinstance(module, nn.DataParallel):
        raise CompositionError(
            "fully_shard got an nn.DataParallel, which copies its module to all GPUs "
            "of a process. Apply fully_shard to its .module, and start a process per "
            "GPU with torchrun."
        )
    if walk.is_container(module):
        raise CompositionError(
            f"fully_shard got a {type(module).__name__}, which has no forward, so "
            "nothing would ever unshard it. Apply fully_shard to its elements, or pass "
            "them as a list to make them one unit."
        )


SUSPECT = (torch.jit.ScriptModule, nn.Embedding, nn.EmbeddingBag)
"""The classes that ``refuse_module`` may refuse; modules of other classes pass."""


def refuse_module(module: nn.Module, fqn: str) -> None:
    """Raise PlanError for a layer whose parameters cannot live in a flat buffer."""
    # TorchScript reads parameters in C++, where full parameters cannot be swapped in.
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(
            f"{type(module).__name__} {quoted(fqn)} is compiled by TorchScript, which "
            "keeps its parameters to itself. Shard the module it was made from, or "
            "pass it in ignored_modules."
        )
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    for option, why in _EMBEDDINGS.items():
        value = getattr(module, option)
        if value is not None and value is not False:
            raise PlanError(
                f"{type(module).__name__} {quoted(fqn)} has {option}={value}: {why}. "
                "Leave the option out, or pass the module in ignored_modules."
            )


_EMBEDDINGS = {
    "max_norm": (
        "it renormalises rows inside forward, and that write would be lost when the "
        "unit is resharded"
    ),
    "sparse": "a sparse gradient cannot be reduced in a flat buffer",
}
"""Options of embeddings that a flat buffer cannot serve, and why."""


def refuse_parameter(parameter: nn.Parameter, fqn: str) -> None:
    """Raise PlanError for a parameter whose data a flat buffer cannot hold."""
    # Nearly all parameters return here. Lazy parameters and DTensors have classes other
    # than nn.Parameter.
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
        dtype = parameter.dtype
        # torch can neither add such gradients nor copy single elements of 4 bits.
        is_narrow = dtype.is_floating_point and dtype.itemsize == 1
        if is_narrow and (parameter.requires_grad or "float4" in str(dtype)):
            raise PlanError(
                f"Parameter {quoted(fqn)} is of {dtype}; expected a wider dtype, or a "
                "frozen one of 8 bits. Keep it wider and cast in forward, or pass it "
                "in ignored_states."
            )
        return
    if is_lazy(parameter):
        raise PlanError(
            f"Parameter {quoted(fqn)} is not initialised yet (a lazy module). Run "
            "a dry forward with the plain model first, then fully_shard."
        )
    if is_dtensor(parameter):
        refuse_placements(parameter, fqn)
        return
    if hasattr(parameter, "__tensor_flatten__") or (
        parameter.layout is torch.strided and _has_no_memory(parameter)
    ):
        raise PlanError(
            f"Parameter {quoted(fqn)} is a {type(parameter).__name__}, a tensor class "
            "with tensors inside, which a flat buffer cannot hold; expected an "
            f"nn.Parameter or a DTensor. {_way_out(parameter)}"
        )
    if parameter.layout is not torch.strided:
        raise PlanError(
            f"Parameter {quoted(fqn)} has layout {parameter.layout}; expected "
            "torch.strided. Make it dense, or pass it in ignored_states."
        )


def _way_out(wrapper: nn.Parameter) -> str:
    """Return the way out for a parameter that wraps tensors, as a sentence."""
    # Weights of torchao's Float8 layers that encode themselves in FSDP2's all-gather.
    # As ignored parameters they would be trained by each rank alone.
    if hasattr(wrapper, "fsdp_pre_all_gather") and wrapper.requires_grad:
        return (
            "It encodes itself in the all-gathers of FSDP2. With torchao, convert with "
            "enable_fsdp_float8_all_gather=False, and pass wire=Float8Wire() of "
            "composable_fsdp.features to send one byte per element."
        )
    return (
        "Call open_wrapped_params(model) first, which shards the tensors inside of "
        "frozen weights, or pass it in ignored_states."
    )


def _has_no_memory(parameter: nn.Parameter) -> bool:
    """Return whether a tensor with elements has no memory of its own, as wrappers."""
    # On meta, and under a fake mode, no tensor has memory.
    if parameter.is_meta or isinstance(parameter, FakeTensor) or not parameter.numel():
        return False
    try:
        return parameter.untyped_storage().data_ptr() == 0
    # A wrapper says so by an error. A data pointer must not be read: it is null.
    except (RuntimeError, NotImplementedError):
        return True


WIDE = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
)
"""Dtypes that need no further look."""


def refuse_overlapping_storage(
    found: Collection[tuple[nn.Parameter, Sequence[Any]]],
) -> None:
    """Raise PlanError if distinct parameters, each with its places, share memory."""
    # Comparing intervals sorts all parameters; the cheap test on storages comes first,
    # and the test of the class saves a call per plain parameter.
    storages = {
        (p if type(p) is nn.Parameter else local_of(p)).untyped_storage()._cdata
        for p, _ in found
    }
    if len(storages) == len(found):
        return
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for given, places in found:
        parameter = local_of(given)
        # An empty parameter occupies no memory.
        if parameter.numel() == 0:
            continue
        size = parameter.element_size()
        start = int(parameter.storage_offset()) * size
        # Distance in elements between the first and the last element in memory; strides
        # count, because a parameter may be a view with gaps.
        reach = sum(
            (n - 1) * int(stride)
            for n, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        key = parameter.untyped_storage()._cdata
        interval = start, start + (reach + 1) * size, places[0].path
        spans.setdefault(key, []).append(interval)
    for intervals in spans.values():
        # After sorting by start, an overlap of any two intervals implies an overlap of
        # two neighbours.
        intervals.sort()
        for (_, stop, first), (start, _, second) in pairwise(intervals):
            if start < stop:
                raise PlanError(
                    f"Parameters {quoted(first)} and {quoted(second)} are different "
                    "objects that share memory; sharding would separate them and only "
                    "one would be trained. Make them one nn.Parameter (tied), or clone "
                    "one of them."
                )
