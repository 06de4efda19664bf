"""The one hook on every optimizer's step: who steps on our parameters, and may it.

An optimizer is met and looked at in its first steps after a module was sharded. After
those a step pays one look for flat parameters and one into a dictionary.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable_fsdp.flat.replaced import times_replaced
from composable_fsdp.optim.guard import (
    prepare_flats,
    require_elementwise,
    require_no_flat_originals,
    require_own_state,
)
from composable_fsdp.optim.strangers import look_for_strangers
from composable_fsdp.optim.watch import meet

_LOOKED_AT = 2
"""The first step sees state that was there before, the second what the first made."""

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, int]] = (
    weakref.WeakKeyDictionary()
)
"""Per optimizer: how many applications and replaced parameters there had been, and
steps looked at since the former."""
_applications = 0


def look_at_optimizers() -> None:
    """Have every optimizer looked at in its next steps; called when a module is cut.

    Those that have stepped already, too: their parameters may just have become parts.
    """
    global _applications
    if not _applications:
        register_optimizer_step_pre_hook(_before_step)
    _applications += 1


def _before_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    prepare_flats(optim)
    applications, replaced, steps = _steps.get(optim, (0, -1, 0))
    now = times_replaced()
    if applications != _applications:
        steps = 0
        meet(optim)  # first, because it turns what was loaded into parts
    if steps == _LOOKED_AT and replaced == now:
        return
    require_elementwise(optim)
    require_no_flat_originals(optim)
    require_own_state(optim)
    if not steps or replaced != now:
        look_for_strangers(optim)
    _steps[optim] = (_applications, now, min(steps + 1, _LOOKED_AT))
