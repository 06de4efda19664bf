"""The casts of a unit's forward under mixed precision."""

from __future__ import annotations

import os

import torch
from torch import nn

from composable_fsdp.flat.full_forms import has_two_forms
from composable_fsdp.flat.handle import FlatParamHandle

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""Environment variable of FSDP1: "1" means that evaluation computes in the parameters'
own dtype. Read when a unit is built."""


class Precision:
    """The casts of a unit with ``mixed_precision``. Created by ``make_precision``."""

    __slots__ = (
        "buffer_dtype",
        "buffer_dtypes",
        "full_in_eval",
        "input_dtype",
        "output_dtype",
        "root_input_dtype",
        "wide_in_eval",
    )

    input_dtype: torch.dtype | None
    """Dtype of floating-point inputs; None leaves inputs unchanged."""
    root_input_dtype: torch.dtype | None
    """As ``input_dtype``, used instead if the unit is the root."""
    output_dtype: torch.dtype | None
    """Dtype of floating-point outputs; None leaves outputs unchanged."""
    buffer_dtype: torch.dtype | None
    """Dtype of floating-point buffers; None leaves buffers unchanged."""
    buffer_dtypes: dict[str, torch.dtype]
    """Original dtypes of the buffers that were cast, by FQN from the unit's module."""
    full_in_eval: bool
    """Whether evaluation computes in full precision. Inputs are then not cast, not even
    by a root without parameters or with a single dtype."""
    wide_in_eval: bool
    """Whether evaluation in full precision uses other parameters or buffers than
    training."""

    def wide(self, module: nn.Module) -> bool:
        """Return whether this forward computes in the parameters' own dtype."""
        return self.wide_in_eval and not module.training


def make_precision(handle: FlatParamHandle) -> Precision | None:
    """Return the casts that the unit's options ask for; ``None`` without casts."""
    mixed = handle.layout.plan.options.mixed_precision
    if mixed is None:
        return None
    precision = Precision()
    # The root casts inputs if either option is set.
    inputs, root_inputs = mixed.cast_forward_inputs, mixed.cast_root_forward_inputs
    precision.input_dtype = mixed.param_dtype if inputs else None
    precision.root_input_dtype = mixed.param_dtype if inputs or root_inputs else None
    precision.output_dtype = mixed.output_dtype
    precision.buffer_dtype = mixed.buffer_dtype
    precision.buffer_dtypes = {}
    # Read here, when the unit is built, and not in every forward.
    precision.full_in_eval = os.environ.get(FULL_PRECISION_IN_EVAL) == "1"
    # Without a second form and without cast buffers, evaluation uses the same tensors
    # as training.
    precision.wide_in_eval = precision.full_in_eval and (
        has_two_forms(handle) or mixed.buffer_dtype is not None
    )
    return precision
