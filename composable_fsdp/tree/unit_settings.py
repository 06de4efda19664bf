"""The settings of a unit that the user can change between steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from composable_fsdp.config import FULL_BY_DEFAULT, StateDictSettings

# An attribute and no weak set: ``torch.utils.swap_tensors`` refuses parameters that
# have weak references.
IGNORED = "_composable_fsdp_left_alone"
"""Attribute that marks parameters as ignored."""


def mark_ignored(ignored: Iterable[nn.Parameter]) -> None:
    """Mark ignored parameters, so that no check warns of them."""
    for parameter in ignored:
        setattr(parameter, IGNORED, True)


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
