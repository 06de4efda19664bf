"""Refuse a gradient scaler that decides on each rank alone, at the first step.

``torch.amp.GradScaler`` skips the step on a rank that found an infinity in its part of
the gradients, and lowers the scale of that rank, while the other ranks step.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, leaf_name

_DEPTH = 32
"""Maximum number of frames between a scaler's step and the optimizer's step: profilers,
schedulers, trainers and the hooks themselves add frames."""


def require_common_decision(optim: torch.optim.Optimizer) -> None:
    """Refuse a step on sharded parameters that torch's own scaler calls.

    Collective: none.
    Raises: CompositionError, on all ranks that step.
    """
    scaler = _find_local_scaler()
    if scaler is None:
        return
    for parameter in (p for group in optim.param_groups for p in group["params"]):
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


def _find_local_scaler() -> torch.amp.GradScaler | None:
    """Return the scaler that called the step, if the scaler asks no other rank."""
    # A scaler passes nothing about itself to the optimizer, so search the call stack.
    # Only the checked first steps do so; later steps pay nothing.
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                return (
                    caller if caller.is_enabled() and _decides_locally(caller) else None
                )
        frame = frame.f_back
    return None


def _decides_locally(scaler: torch.amp.GradScaler) -> bool:
    """Return whether the scaler searches infinities with torch's own methods."""
    # torch's methods look at the gradients of this rank only. A subclass that overrides
    # either of the two is trusted to combine the ranks.
    own, base = type(scaler), torch.amp.GradScaler
    return own.unscale_ is base.unscale_ and own._unscale_grads_ is base._unscale_grads_
