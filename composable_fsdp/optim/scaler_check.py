"""Refuse a gradient scaler that decides on each rank alone, at the first step.

``torch.amp.GradScaler`` skips the step on a rank that found an infinity in its part of
the gradients, and lowers the scale of that rank, while the other ranks step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, leaf_name

_stepping: ContextVar[torch.amp.GradScaler | None] = ContextVar(
    "stepping_scaler", default=None
)
"""The scaler whose ``step`` is running."""

AGREED: list[Callable[[torch.Tensor], bool]] = []
"""Each says whether ranks decide together about a parameter under torch's own scaler,
as those do whose module ``composable_fsdp.fsdp2`` has sharded."""


def note_scaler_steps() -> None:
    """Have ``torch.amp.GradScaler.step`` say which scaler steps. Call once.

    A scaler passes nothing about itself to the optimizer's step. Subclasses that
    override ``step`` call the method of their base class.
    """
    kind: Any = torch.amp.GradScaler
    step = kind.step

    @wraps(step)
    def noted(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        token = _stepping.set(self)
        try:
            return step(self, *args, **kwargs)
        finally:
            _stepping.reset(token)

    kind.step = noted


def require_common_decision(optim: torch.optim.Optimizer) -> None:
    """Refuse a step on sharded parameters that torch's own scaler calls.

    Collective: none.
    Raises: CompositionError, on all ranks that step.
    """
    scaler = _stepping.get()
    if scaler is None or not scaler.is_enabled() or not _decides_locally(scaler):
        return
    for parameter in (p for group in optim.param_groups for p in group["params"]):
        if any(agreed(parameter) for agreed in AGREED):
            continue
        leaf, flat = cut_leaf(parameter), find_flat(parameter)
        if leaf is not None:
            name = leaf_name(*leaf)
        elif flat is not None and flat[0].groups.shard is not None:
            name = flat_name(*flat)
        else:
            continue
        raise CompositionError(
            f"{type(optim).__name__} steps under torch's {type(scaler).__name__}, and "
            f"of {name} each rank holds a part only: a rank that finds an infinity in "
            "its part would skip the step and lower its scale, while the others step. "
            "Use composable_fsdp.ShardedGradScaler, which takes the same arguments "
            "and decides for all ranks together."
        )


def _decides_locally(scaler: torch.amp.GradScaler) -> bool:
    """Return whether the scaler searches infinities with torch's own methods."""
    # torch's methods look at the gradients of this rank only. A subclass that overrides
    # either of the two is trusted to combine the ranks.
    own, base = type(scaler), torch.amp.GradScaler
    return own.unscale_ is base.unscale_ and own._unscale_grads_ is base._unscale_grads_
