"""The rule that tells scalar optimizer state from element-wise state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

SCALARS = ("step", "mu_product", "eta", "mu")
"""Names of scalar state in ``torch.optim``. For a 0-d parameter, the shape does not
distinguish such state from element-wise state."""


def is_scalar(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state is a single value per parameter, equal on all ranks."""
    return not isinstance(value, Tensor) or is_scalar_shape(name, value.shape, shape)


def is_scalar_shape(name: str, own: Sequence[int], shape: Sequence[int]) -> bool:
    """Answer ``is_scalar`` for a tensor that is not read yet."""
    return len(own) == 0 and (len(shape) > 0 or name in SCALARS)
