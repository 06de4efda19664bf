"""What a unit casts, and the settings that the user can change between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from composable_fsdp.config import FULL_BY_DEFAULT, StateDictSettings
from composable_fsdp.flat.handle import FlatParamHandle

# An attribute and no weak set: ``torch.utils.swap_tensors`` refuses parameters that
# have weak references.
IGNORED = "_composable_fsdp_left_alone"
"""Attribute that marks parameters as ignored."""


@dataclass(slots=True)
class UnitSettings:
    """The settings of a unit that the user can change between steps."""

    reshard_after_forward: bool | None = None
    """``None`` until lazy initialization chooses: True except for the root."""
    prefetches_forward: bool = False
    """Whether the unit's forward prefetches another unit."""
    sync_gradients: bool = True
    """Whether a backward reduces gradients; False under ``no_sync``."""
    is_last_backward: bool = True
    """Of the root: whether the end of backward waits for the last reduction."""
    reshard_after_backward: bool = True
    state_dict: StateDictSettings = FULL_BY_DEFAULT


@dataclass(slots=True)
class Precision:
    """The casts of a unit with ``mixed_precision``."""

    input_dtype: torch.dtype | None
    """Dtype of floating-point inputs; None leaves inputs unchanged."""
    root_input_dtype: torch.dtype | None
    """As ``input_dtype``, used instead if the unit is the root."""
    output_dtype: torch.dtype | None
    """Dtype of floating-point outputs; None leaves outputs unchanged."""
    buffer_dtype: torch.dtype | None
    """Dtype of floating-point buffers; None leaves buffers unchanged."""
    buffer_dtypes: dict[tuple[int, str], torch.dtype] = field(default_factory=dict)
    """Original dtypes of the buffers that were cast, by the number of the unit's module
    and the FQN from this module."""


def make_precision(handle: FlatParamHandle, *, is_local_root: bool) -> Precision | None:
    """Return the casts that the unit's options ask for; ``None`` without casts."""
    mixed = handle.layout.plan.options.mixed_precision
    if mixed is None:
        return None
    # The root casts inputs if either option is set. So does, without a wrapper, the
    # root of each call, as in torch's composable FSDP1: precision is configured there.
    root_inputs = mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
    inputs = root_inputs if is_local_root else mixed.cast_forward_inputs
    return Precision(
        mixed.param_dtype if inputs else None,
        mixed.param_dtype if root_inputs else None,
        mixed.output_dtype,
        mixed.buffer_dtype,
    )
