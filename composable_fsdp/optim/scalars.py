"""The rules that tell scalar optimizer state, and wrappers, from plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_fsdp.planning.dtensors import is_dtensor

SCALARS = ("step", "mu_product", "eta", "mu")
"""Names of scalar state in ``torch.optim``. For a 0-d parameter, the shape does not
distinguish such state from element-wise state."""


def is_scalar(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state is a single value per parameter, equal on all ranks."""
    return not isinstance(value, Tensor) or is_scalar_shape(name, value.shape, shape)


def is_scalar_shape(name: str, own: Sequence[int], shape: Sequence[int]) -> bool:
    """Answer ``is_scalar`` for a tensor that is not read yet."""
    return len(own) == 0 and (len(shape) > 0 or name in SCALARS)


def is_wrapper(value: Any) -> bool:
    """Return whether ``value`` is a tensor that wraps others other than a DTensor."""
    if type(value) is Tensor or not isinstance(value, Tensor) or is_dtensor(value):
        return False
    wraps: bool = is_traceable_wrapper_subclass(value)
    return wraps
