"""The settings of a unit that the user can change between steps."""

from __future__ import annotations

from collections.abc import Iterable

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


class UnitSettings:
    """The settings of a unit that the user can change between steps."""

    __slots__ = (
        "is_last_backward",
        "prefetches_forward",
        "reshard_after_backward",
        "reshard_after_forward",
        "state_dict",
        "sync_gradients",
    )

    def __init__(
        self,
        reshard_after_forward: bool | None = None,
        *,
        prefetches_forward: bool = False,
        sync_gradients: bool = True,
        is_last_backward: bool = True,
        reshard_after_backward: bool = True,
        state_dict: StateDictSettings = FULL_BY_DEFAULT,
    ) -> None:
        self.sync_gradients = sync_gradients
        """Whether a backward reduces gradients; False under ``no_sync``."""
        self.is_last_backward = is_last_backward
        """Read from the root only: whether the end of backward waits for the last
        reduction."""
        self.reshard_after_forward = reshard_after_forward
        """``None``, the default, until lazy initialization chooses: True except for the
        root."""
        self.reshard_after_backward = reshard_after_backward
        """Whether the unit is resharded after its backward. Default: True."""
        self.prefetches_forward = prefetches_forward
        """Whether the unit's forward prefetches another unit."""
        self.state_dict = state_dict
        """Settings of ``set_state_dict_type``."""

    def copy(self) -> UnitSettings:
        """Return equal settings, for a copied unit."""
        return UnitSettings(
            self.reshard_after_forward,
            prefetches_forward=self.prefetches_forward,
            sync_gradients=self.sync_gradients,
            is_last_backward=self.is_last_backward,
            reshard_after_backward=self.reshard_after_backward,
            state_dict=self.state_dict,
        )
