"""The precision of a unit: the dtypes of its casts, and the two forms of its values.

With mixed precision, a step gathers in the compute dtype; elsewhere parameters may be
shown in their own dtype, in a second form (``handle.other_form``) of full buffers.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from composable_fsdp.flat.build import make_form
from composable_fsdp.flat.build_region import (
    compute_views,
    full_leaves,
    make_full,
)
from composable_fsdp.flat.casts import Precision
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.residency import forget_readable
from composable_fsdp.phases import Residency

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""Environment variable of FSDP1: "1" means that evaluation computes in the parameters'
own dtype. Read when a unit is built."""


def make_precision(handle: FlatParamHandle, *, is_local_root: bool) -> Precision | None:
    """Return the casts that the unit's options ask for; ``None`` without casts."""
    mixed = handle.layout.plan.options.mixed_precision
    if mixed is None:
        return None
    # The root casts inputs if either option is set. So does, without a wrapper, the
    # root of each call, as in torch's composable FSDP1: precision is configured there.
    root_inputs = mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
    inputs = root_inputs if is_local_root else mixed.cast_forward_inputs
    # Read here, when the unit is built, and not in every forward.
    full_in_eval = os.environ.get(FULL_PRECISION_IN_EVAL) == "1"
    # Without a second form and without cast buffers, evaluation uses the same tensors
    # as training.
    other = has_two_forms(handle) or mixed.buffer_dtype is not None
    return Precision(
        mixed.param_dtype if inputs else None,
        mixed.param_dtype if root_inputs else None,
        mixed.output_dtype,
        mixed.buffer_dtype,
        full_in_eval=full_in_eval,
        wide_in_eval=full_in_eval and other,
    )


def has_two_forms(handle: FlatParamHandle) -> bool:
    """Return whether the compute dtype differs from the dtype of the parameters."""
    options = handle.layout.plan.options
    return any(
        options.dtypes(r.layout.dtype).compute != r.layout.dtype or r.layout.wire
        for r in handle.layout.regions
    )


def switch_form(handle: FlatParamHandle) -> bool:
    """Make the other precision current; return whether its leaves are new."""
    assert handle.residency is Residency.SHARDED
    form, other = handle.form, handle.other_form
    forget_readable(form)
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
                    forms=handle.layout.forms,
                )
        other = make_form(handle.layout, form.unreadable, full_precision=True)
        other.regions = tuple([region.full for region in handle.layout.regions])
    else:
        for region, full in zip(handle.layout.regions, other.regions, strict=True):
            region.full = full
    handle.form, handle.other_form = other, form
    return made


def renew_full_leaves(
    handle: FlatParamHandle,
) -> list[tuple[nn.Parameter, nn.Parameter, nn.Parameter]]:
    """Give the unit new full leaves without hooks; return (old, new, sharded)."""
    found: list[tuple[nn.Parameter, nn.Parameter, nn.Parameter]] = []
    for region in handle.layout.regions:
        full, layout = region.full, region.layout
        made = full_leaves(
            layout,
            compute_views(layout, full.buffer),
            region.leaves,
            handle.layout.forms,
            [layout.trainable] * len(full.leaves),
        )
        found += zip(full.leaves, made, region.leaves, strict=True)
        region.full = full._replace(leaves=tuple(made))
    form = handle.form
    handle.form = make_form(
        handle.layout, form.unreadable, full_precision=form.full_precision
    )
    if form.regions:
        handle.form.regions = tuple([region.full for region in handle.layout.regions])
    return found
