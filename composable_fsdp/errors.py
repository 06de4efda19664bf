"""The exceptions and warnings of this package.

Every message names the expected value, the actual value, the place and the remedy. It
ends with the rank that raised, if a process group exists. Wrong arguments raise a plain
``TypeError`` or ``ValueError``: the same call raises it on every rank.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "CompositionError",
    "DesyncError",
    "FSDPError",
    "NotRootError",
    "PhaseError",
    "PlanError",
]

PACKAGE = f"{Path(__file__).parent}/"
TORCH = f"{Path(dist.__file__).parents[1]}/"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user that led here."""
    frame, inner = sys._getframe(1), (PACKAGE, TORCH, contextlib.__file__)
    # The last frame if no other is found: a thread of autograd has none of the user.
    while (back := frame.f_back) and frame.f_code.co_filename.startswith(inner):
        frame = back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    at = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    warnings.warn_explicit(text, category, *at, seen)


class FSDPError(Exception):
    """The base class of all errors that this package raises on purpose.

    Args:
        *args: the message.
        unit: the fully sharded module that the error is about, as messages name it.
        op: the kind of the collective.
        phase: the phase of the step, or the function that the program has called.
        elapsed: seconds from the issue of the collective to the error.

    The arguments are attributes, empty or None if unknown. ``rank`` is the global rank
    that raised; None if torch.distributed is not initialized.
    """

    rank: int | None = None

    def __init__(
        self,
        *args: object,
        unit: str = "",
        op: str = "",
        phase: str = "",
        elapsed: float | None = None,
    ) -> None:
        super().__init__(*args)
        self.unit, self.op, self.phase, self.elapsed = unit, op, phase, elapsed
        # Read the rank here: the process group may be gone when the message is printed.
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.rank is None else f"{text} [rank {self.rank}]"


class CompositionError(FSDPError, ValueError):
    """An API was applied to a module that forbids the application."""


class PlanError(FSDPError, ValueError):
    """A model or an option cannot be sharded as requested; nothing was changed."""


class PhaseError(FSDPError, RuntimeError):
    """A call came at a moment of the step that forbids the call."""


class CheckpointError(FSDPError, RuntimeError):
    """A state dict or a checkpoint does not fit the model; the message lists where."""


class DesyncError(FSDPError, RuntimeError):
    """Ranks disagree on the collectives or the calls that they make."""

    is_known_to_all = False
    """Whether all ranks of the process group have raised the error, too."""


class CollectiveError(FSDPError, RuntimeError):
    """A collective failed in the backend; the cause is the error of the backend."""


class NotRootError(FSDPError, AttributeError):
    """Root-only data was read from a state that is not a root."""
