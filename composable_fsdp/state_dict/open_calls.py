"""The calls of ``nn.Module.state_dict`` that run over modules of units.

torch calls the hooks of a module inside a unit also if the call came from the unit::

    unit.state_dict()        pre-hook: begin_call
      part.state_dict()      hook: is_inside_call -> True, leave the work to the unit
                             hook of the unit: end_call
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from composable_fsdp.tree.state import _FSDPState

_calls: dict[FrameType, tuple[_FSDPState, str]] = {}
"""By the frame of a call: the unit, and the prefix of the call's keys."""


def begin_call(state: _FSDPState, prefix: str, frame: FrameType) -> None:
    """Record a call of ``state_dict``.

    Args:
        state: the unit.
        prefix: the prefix of the keys of the unit's module.
        frame: the frame in which the pre-hooks of the call run.

    Collective: none.
    """
    # A call that raised has not come to ``end_call``; its frame holds a state dict.
    for other in tuple(_calls):
        try:
            other.clear()
        except RuntimeError:  # the call is running
            continue
        del _calls[other]
    _calls[frame] = state, prefix


def end_call(frame: FrameType) -> None:
    """Forget the call whose hooks run in ``frame``."""
    _calls.pop(frame, None)


def is_inside_call(state: _FSDPState, prefix: str, state_dict: dict[str, Any]) -> bool:
    """Return whether a call further out, over a module of the unit, fills the dict.

    Args:
        state: the unit.
        prefix: the prefix of the keys of the module that asks.
        state_dict: the dict that the module fills.

    Collective: none.
    """
    # torch notes every module that fills a dict in ``_metadata`` of the dict. Another
    # dict belongs to a separate call, made inside a hook or inside an overridden
    # ``state_dict``.
    filled = getattr(state_dict, "_metadata", ())
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        unit, outer = _calls.get(frame, (None, ""))
        if unit is state and prefix != outer and prefix.startswith(outer):
            return outer[:-1] in filled
        frame = frame.f_back
    return False
