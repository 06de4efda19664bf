"""``Precision``: the casts of a unit with ``mixed_precision``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn


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
    full_in_eval: bool
    """Whether evaluation computes in full precision. Inputs are then not cast, not even
    by a root without parameters or with a single dtype."""
    wide_in_eval: bool
    """Whether evaluation in full precision uses other parameters or buffers than
    training."""
    buffer_dtypes: dict[tuple[int, str], torch.dtype] = field(default_factory=dict)
    """Original dtypes of the buffers that were cast, by the number of the unit's module
    and the FQN from this module."""

    def wide(self, module: nn.Module) -> bool:
        """Return whether this forward computes in the parameters' own dtype."""
        return self.wide_in_eval and not module.training
