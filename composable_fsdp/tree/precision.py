"""Which casts a unit's forward makes."""

from __future__ import annotations

import os

import torch
from torch import nn

from composable_fsdp.flat.full_forms import has_two_forms
from composable_fsdp.flat.handle import FlatParamHandle

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""Environment variable, FSDP1's: "1" computes in the parameters' dtype in evaluation.

Read when a unit is made.
"""


class Precision:
    """The casts of one unit with ``mixed_precision``. Made by ``make_precision``."""

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
    root_input_dtype: torch.dtype | None
    """The same if the unit is the root."""
    output_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    buffer_dtypes: dict[str, torch.dtype]
    """Buffers that were cast, by name from the unit's module, and what they were."""
    full_in_eval: bool
    """Whether evaluation is in full precision: inputs stay as they come, also those of
    a root whose own parameters have one dtype, or that has none."""
    wide_in_eval: bool
    """Whether it then takes other parameters or buffers."""

    def wide(self, module: nn.Module) -> bool:
        """Whether this forward computes in the parameters' own dtype."""
        return self.wide_in_eval and not module.training


def make_precision(handle: FlatParamHandle) -> Precision | None:
    """What the unit's options ask for; ``None`` if they ask for no cast."""
    mixed = handle.plan.options.mixed_precision
    if mixed is None:
        return None
    precision = Precision()
    inputs, root_inputs = mixed.cast_forward_inputs, mixed.cast_root_forward_inputs
    precision.input_dtype = mixed.param_dtype if inputs else None
    precision.root_input_dtype = mixed.param_dtype if inputs or root_inputs else None
    precision.output_dtype = mixed.output_dtype
    precision.buffer_dtype = mixed.buffer_dtype
    precision.buffer_dtypes = {}
    precision.full_in_eval = os.environ.get(FULL_PRECISION_IN_EVAL) == "1"
    precision.wide_in_eval = precision.full_in_eval and (
        has_two_forms(handle) or mixed.buffer_dtype is not None
    )
    return precision
