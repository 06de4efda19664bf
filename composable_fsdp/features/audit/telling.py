"""Warnings and errors of the audit, at the line of the user's code."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from composable_fsdp.errors import PACKAGE, TORCH, CompositionError, warn

P = ParamSpec("P")
T = TypeVar("T")
_OPTIM = f"{TORCH}optim/"
_DOOR = f"{PACKAGE}doors/fsdp2_torch.py"
"""Wraps functions of torch, for all programs once FSDP2's names are used."""
_OWNERS = f"{PACKAGE}features/owners/map_on_owners.py"
_OWN_CALLS = tuple(
    f"{TORCH}{folder}/"
    for folder in ("optim", "distributed", "_dynamo", "_inductor", "_functorch", "fx")
)
"""Parts of torch that may do with shards what they do: torch's element-wise optimizers
(``optim.step_checks`` refuses the others), checkpoints, compilers."""


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


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    optimizer: str
    """Class of the optimizer whose method runs the line, else empty."""


def is_own_call(frame: FrameType, func: Any) -> bool:
    """Return whether this package calls, or torch's optimizers read an attribute."""
    # Most calls of a step are these: ``zero_grad`` reads each gradient a few times.
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) or (
        getattr(func, "__name__", "") == "__get__" and file.startswith(_OPTIM)
    )


def place_of(frame: FrameType | None) -> Place | None:
    """Return the user's line that led to ``frame``; None where parts are right."""
    entry = ""
    # The audit's own mode stands between a backward and the user.
    while frame is not None and (
        (file := frame.f_code.co_filename).startswith((TORCH, _DOOR))
        or frame.f_code.co_name == "__torch_function__"
    ):
        entry, frame = file, frame.f_back
    if frame is None or entry.startswith(_OWN_CALLS):
        return None
    code = frame.f_code
    # A subclass of a scaler that overrides these asks the other ranks itself.
    if code.co_filename.startswith(PACKAGE) or code.co_name in _UNSCALE:
        return None
    optimizer = ""
    caller: FrameType | None = frame
    while caller is not None:
        # ``map_on_owners`` gives whole parameters to the user's function.
        if caller.f_code.co_filename == _OWNERS:
            return None
        # Before Python 3.13, ``f_locals`` would keep what a frame of the user holds.
        owner = caller.f_locals.get("self") if _is_of_optimizer(caller.f_code) else None
        if isinstance(owner, torch.optim.Optimizer):
            if getattr(owner, "works_on_shards", False):
                return None
            optimizer = optimizer or type(owner).__name__
        caller = caller.f_back
    return Place(code.co_filename, frame.f_lineno, optimizer)


@lru_cache(4096)
def _is_of_optimizer(code: CodeType) -> bool:
    """Return whether ``code`` is a method of a class of optimizers."""
    if code.co_varnames[:1] != ("self",):
        return False
    classes = [torch.optim.Optimizer]
    for each in classes:
        classes += each.__subclasses__()
    # Decorators of torch hide the code of ``step``.
    return any(
        getattr(unwrap(method), "__code__", None) is code
        for base in {base for each in classes for base in each.__mro__}
        for method in vars(base).values()
        if callable(method)
    )


_UNSCALE = ("unscale_", "_unscale_grads_")


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


def tell(text: str, place: Place | None, *, is_error: bool) -> None:
    """Warn at ``place``, or raise CompositionError."""
    text = f"composable_fsdp: shard taken for the parameter: {text}"
    if is_error:
        where = f" ({place.file}:{place.line})" if place else ""
        raise CompositionError(text + where)
    if place is None:
        warn(text)
    else:
        warnings.warn_explicit(text, UserWarning, place.file, place.line)
