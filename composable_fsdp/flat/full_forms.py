"""The two precisions in which a unit can be full: that of compute, and its own.

With mixed precision the step gathers in the compute dtype. Outside the step, and in
evaluation on request, the parameters are shown as they are: a second set of full
buffers and leaves in their own dtype, made when it is first wanted. One of the two is
current; what the runtime reads of a handle is that one's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.flat.build import make_gather_lists, place_leaves
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import make_full


class FullForm(NamedTuple):
    """What belongs to one precision; per region: buffer, slice, is_cut, leaves."""

    regions: tuple[tuple[Tensor, Tensor | None, bool, tuple[nn.Parameter, ...]], ...]
    placed: tuple[nn.Parameter, ...]
    gather_lists: tuple[list[Tensor], list[Tensor]]
    fills: tuple[tuple[Tensor, Tensor], ...]
    needs_gather: bool
    accumulators: tuple[Any, ...]


def has_two_forms(handle: FlatParamHandle) -> bool:
    """Whether the unit computes in another dtype than its parameters have."""
    options = handle.plan.options
    return any(
        options.dtypes(r.layout.dtype).compute != r.layout.dtype for r in handle.regions
    )


def switch_form(handle: FlatParamHandle) -> bool:
    """Make the other precision current; the unit must be sharded and hold no memory.

    Returns True if its leaves were made now, and so have no hooks yet. Sends nothing.
    """
    assert not handle.gathered
    assert not handle.is_full
    other = handle.other_form
    handle.other_form = _current(handle)
    handle.wide = not handle.wide
    handle.readable = None  # that of the leaves that were current
    if other is None:
        _make_full_precision(handle)
        return True
    for region, (full, own_slice, is_cut, leaves) in zip(
        handle.regions, other.regions, strict=True
    ):
        region.full, region.own_slice = full, own_slice
        region.is_cut, region.full_leaves = is_cut, leaves
    handle.full_placed, handle.gather_lists = other.placed, other.gather_lists
    handle.fills = other.fills
    handle.needs_gather, handle.accumulators = other.needs_gather, other.accumulators
    return False


def _current(handle: FlatParamHandle) -> FullForm:
    return FullForm(
        tuple((r.full, r.own_slice, r.is_cut, r.full_leaves) for r in handle.regions),
        handle.full_placed,
        handle.gather_lists,
        handle.fills,
        handle.needs_gather,
        handle.accumulators,
    )


def _make_full_precision(handle: FlatParamHandle) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for region in handle.regions:
            make_full(region, region.layout.dtype)
    handle.full_placed = place_leaves(handle, [r.full_leaves for r in handle.regions])
    make_gather_lists(handle)
