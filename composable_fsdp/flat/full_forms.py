"""The two precisions in which a unit can be unsharded: compute dtype and own dtype.

With mixed precision, a step gathers in the compute dtype. Outside the step, and in
evaluation if requested, parameters are shown in their own dtype: a second set of full
buffers and leaves, created at the first use. ``handle.form`` is the current form, and
``handle.other_form`` the other.
"""

from __future__ import annotations

import torch

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
        form.regions = tuple([region.full for region in handle.layout.regions])
        # The buffers outlive the caller's inference mode, so they must not be inference
        # tensors.
        with torch.inference_mode(False), torch.no_grad():
            for region in handle.layout.regions:
                region.full = make_full(
                    region.layout,
                    region.leaves,
                    region.shard,
                    region.layout.dtype,
                    region.rank,
                    region.device,
                    offload=region.offload,
                )
        other = make_form(handle.layout, form.unreadable, full_precision=True)
        other.regions = tuple([region.full for region in handle.layout.regions])
    else:
        for region, full in zip(handle.layout.regions, other.regions, strict=True):
            region.full = full
    handle.form, handle.other_form = other, form
    return made
