"""Warnings and errors of the audit, at the line of the user's code."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

from composable_fsdp.errors import PACKAGE, TORCH, CompositionError, warn

P = ParamSpec("P")
T = TypeVar("T")
OPTIM = f"{TORCH}optim/"
_DOOR = f"{PACKAGE}doors/fsdp2_torch.py"
"""Wraps functions of torch, for all programs once FSDP2's names are used."""
_OWNERS = f"{PACKAGE}features/owners.py"
_OWN_CALLS = tuple(
    f"{TORCH}{folder}/"
    for folder in ("optim", "distributed", "_dynamo", "_inductor", "_functorch", "fx")
)
"""Parts of torch that may do with shards what they do: torch's element-wise optimizers
(``optim.step_checks`` refuses the others), checkpoints, compilers."""
_UNSCALE = ("unscale_", "_unscale_grads_")

_log = logging.getLogger(__name__)


def harmless(function: Callable[P, T]) -> Callable[P, T | None]:
    """Return ``function`` with its own errors in the log, and None in their place."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except (CompositionError, Warning):  # what the audit tells
            raise
        except Exception:
            _log.warning("The audit has missed a call by an error.", exc_info=True)
            return None

    return guarded


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame that led to ``frame``; None where parts are right."""
    entry = ""
    # The audit's own mode stands between a backward and the user.
    while frame is not None and (
        (file := frame.f_code.co_filename).startswith((TORCH, _DOOR))
        or frame.f_code.co_name == "__torch_function__"
    ):
        entry, frame = file, frame.f_back
    if frame is None or entry.startswith(_OWN_CALLS):
        return None
    caller: FrameType | None = frame
    while caller is not None:
        # ``map_on_owners`` gives whole parameters to the user's function.
        if caller.f_code.co_filename == _OWNERS:
            return None
        caller = caller.f_back
    # A subclass of a scaler that overrides these asks the other ranks itself.
    is_ours = frame.f_code.co_filename.startswith(PACKAGE)
    return None if is_ours or frame.f_code.co_name in _UNSCALE else frame


def backward_frame(code: object) -> FrameType | None:
    """Return the frame of ``code`` in this thread, or in the thread that waits."""
    # On CUDA, hooks run in a thread of the engine, without the frames of the user.
    for frame in (sys._getframe(), *sys._current_frames().values()):
        found: FrameType | None = frame
        while found is not None:
            if found.f_code is code:
                return found
            found = found.f_back
    return None


def tell(text: str, frame: FrameType | None, *, is_error: bool) -> None:
    """Warn at the line of ``frame``, or raise CompositionError."""
    text = f"composable_fsdp: shard taken for the parameter: {text}"
    place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
    if is_error:
        where = " ({}:{})".format(*place) if place else ""
        raise CompositionError(text + where)
    if place is None:
        warn(text)
    else:
        warnings.warn_explicit(text, UserWarning, *place)
