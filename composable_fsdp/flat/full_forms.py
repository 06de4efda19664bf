"""The two precisions in which a unit can be unsharded: compute dtype and own dtype.

With mixed precision, a step gathers in the compute dtype. Outside the step, and in
evaluation if requested, parameters are shown in their own dtype: a second set of full
buffers and leaves, created at the first use. The handle's fields always belong to the
current form; the other form is stored as a ``FullForm``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.flat.build import make_gather_lists, place_leaves
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import make_full
from composable_fsdp.phases import Residency


class FullForm(NamedTuple):
    """The buffers and leaves of a precision, while the other precision is current."""

    regions: tuple[tuple[Tensor, Tensor | None, bool, tuple[nn.Parameter, ...]], ...]
    """Per region: ``full``, ``own_slice``, ``is_cut`` and ``full_leaves``."""
    placed: tuple[nn.Parameter, ...]
    """``full_placed`` of the handle."""
    gather_lists: tuple[list[Tensor], list[Tensor]]
    fills: tuple[tuple[Tensor, Tensor], ...]
    needs_gather: bool
    accumulators: tuple[Any, ...]


def has_two_forms(handle: FlatParamHandle) -> bool:
    """Return whether the compute dtype differs from the dtype of the parameters."""
    options = handle.plan.options
    return any(
        options.dtypes(r.layout.dtype).compute != r.layout.dtype for r in handle.regions
    )


def switch_form(handle: FlatParamHandle) -> bool:
    """Make the other precision current; the unit must be sharded and hold no memory.

    Returns: True if full leaves were created now, which have no hooks yet.
    Collective: none.
    """
    assert handle.residency is Residency.SHARDED
    # The current form must be saved before the fields are overwritten.
    other = handle.other_form
    handle.other_form = _current(handle)
    handle.wide = not handle.wide
    # ``readable`` describes the leaves that were current until now.
    handle.readable = None
    if other is None:
        _make_full_precision(handle)
        return True
    # The second form exists already: exchange buffers and leaves, and create nothing.
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
    """Return the current form as a ``FullForm``."""
    return FullForm(
        tuple((r.full, r.own_slice, r.is_cut, r.full_leaves) for r in handle.regions),
        handle.full_placed,
        handle.gather_lists,
        handle.fills,
        handle.needs_gather,
        handle.accumulators,
    )


def _make_full_precision(handle: FlatParamHandle) -> None:
    """Create full buffers and leaves in the parameters' own dtype, as current form."""
    # The buffers outlive the caller's inference mode, so they must not be inference
    # tensors.
    with torch.inference_mode(False), torch.no_grad():
        for region in handle.regions:
            make_full(region, region.layout.dtype)
    handle.full_placed = place_leaves(handle, [r.full_leaves for r in handle.regions])
    make_gather_lists(handle)
