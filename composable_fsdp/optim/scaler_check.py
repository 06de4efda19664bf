"""A gradient scaler that decides on each rank by itself is refused at the first step.

``torch.amp.GradScaler`` skips the step of a rank that found an infinity in its part of
the gradients, and lowers that rank's scale, while the others step. It tells an
optimizer nothing of itself, so it is found among the callers of the step, in the steps
that are looked at. Later steps pay nothing.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, leaf_name

_DEPTH = 32
"""Frames between a scaler's step and the optimizer's: profilers, schedulers, trainers
and the hooks themselves put some there."""


def require_common_decision(optim: torch.optim.Optimizer) -> None:
    """Refuse a step on parts of parameters that torch's own scaler decided on.

    Sends nothing. Raises: CompositionError, on all ranks that step.
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
    """The scaler that called the step, if it asks no other rank."""
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
    """Whether what looks for infinities is torch's own, of one rank's gradients."""
    own, base = type(scaler), torch.amp.GradScaler
    return own.unscale_ is base.unscale_ and own._unscale_grads_ is base._unscale_grads_
