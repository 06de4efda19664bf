"""The two precisions in which a unit can be unsharded: compute dtype and own dtype.

With mixed precision, a step gathers in the compute dtype. Outside the step, and in
evaluation if requested, parameters are shown in their own dtype: a second set of full
buffers and leaves, created at the first use. ``handle.form`` is the current form, and
``handle.other_form`` the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composable_fsdp.flat.build import make_form
from composable_fsdp.flat.build_region import make_full
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.phases import Residency


def has_two_forms(handle: FlatParamHandle) -> bool:
    """Return whether the compute dtype differs from the dtype of the parameters."""
    options = handle.layout.plan.options
    return any(
        options.dtypes(r.layout.dtype).compute != r.layout.dtype
        for r in handle.layout.regions
    )


def switch_form(handle: FlatParamHandle) -> bool:
    """Make the other precision current; the unit must be sharded and hold no memory.

    Returns: True if full leaves were created now, which have no hooks yet.
    Collective: none.
    """
    assert handle.residency is Residency.SHARDED
    form, other = handle.form, handle.other_form
    form.readable = None
    made = other is None
    if other is None:
        form.regions = _buffers(handle)
        # The buffers outlive the caller's inference mode, so they must not be inference
        # tensors.
        with torch.inference_mode(False), torch.no_grad():
            for region in handle.layout.regions:
                make_full(region, region.layout.dtype)
        other = make_form(handle.layout, form.unreadable, full_precision=True)
        other.regions = _buffers(handle)
    else:
        for region, buffers in zip(handle.layout.regions, other.regions, strict=True):
            region.full, region.own_slice, region.is_cut, region.full_leaves = buffers
    handle.form, handle.other_form = other, form
    return made


def _buffers(
    handle: FlatParamHandle,
) -> tuple[tuple[Tensor, Tensor | None, bool, tuple[nn.Parameter, ...]], ...]:
    """Return what a region has of the current form, per region."""
    return tuple(
        (r.full, r.own_slice, r.is_cut, r.full_leaves) for r in handle.layout.regions
    )
