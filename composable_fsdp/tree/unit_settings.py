"""The settings of a unit, and facts that its first forwards search for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

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
    """The settings of a unit that the user can change between steps.

    ``access.settings``, ``access.schedule``, ``no_sync`` and ``set_state_dict_type``
    change the settings.
    """

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


_FORWARDS = 2
"""Number of forwards of a module that search."""


class ForwardSearches:
    """Facts that the first forwards of a unit search for.

    Searches take too long for every step, so only the first forwards search: of each
    module, because another module of the unit may write, or keep a tensor.
    """

    __slots__ = (
        "acts",
        "awaits_buffers",
        "before",
        "drawn",
        "kept_at",
        "looks",
        "scans",
        "was_on_meta",
        "weights_at",
        "writes_data",
    )

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        writes_data: bool = False,
        awaits_buffers: bool = False,
    ) -> None:
        self.looks = dict.fromkeys(map(id, modules), _FORWARDS)
        """Number of further forwards, by identity of the module, that check for writes
        to weights through ``.data``; without the modules that need no check."""
        self.scans = self.looks.copy()
        """The same of forwards that search modules for tensors on attributes
        (``runtime.escaped_tensors``)."""
        self.kept_at: tuple[tuple[dict[str, Any], str], ...] = ()
        """The attributes (table, key) on which the searches found tensors."""
        self.before: list[Tensor] | None = None
        """``flat.forward_writes.snapshot`` of the full parameters when such a forward
        began."""
        self.writes_data = writes_data
        """Whether such a write was found. Every later forward then copies its weights
        to the shards."""
        self.weights_at: tuple[tuple[dict[str, Any], str], ...] = ()
        """The attributes (table, key) on which forwards keep views of weights."""
        self.acts = writes_data
        """Whether the end of a forward must look at any of the last three."""
        self.awaits_buffers = awaits_buffers
        """Whether buffers of the unit were on meta and may still have no values."""
        self.drawn: dict[int, int] = {}
        """By slot index: the start of random numbers that were drawn into a shard."""
        self.was_on_meta = False
        """Whether shards of the model were on meta on any rank; known from the first
        gather."""

    def end_forward(self) -> None:
        """Forget the values of before; later forwards act on what was found."""
        self.before = None
        self.acts = self.writes_data or bool(self.weights_at)

    def copy(self, modules: Iterable[nn.Module]) -> ForwardSearches:
        """Return the searches of a copied unit, which has ``modules``."""
        return ForwardSearches(
            modules,
            writes_data=self.writes_data,
            awaits_buffers=self.awaits_buffers,
        )


def count_down(left: dict[int, int], module: nn.Module) -> bool:
    """Count a forward of ``module``; return whether the forward searches."""
    number = left.pop(id(module), 0)
    if number > 1:
        left[id(module)] = number - 1
    return number > 0
