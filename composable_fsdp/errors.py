"""The exceptions of this package, drawn as a list.

::

    FSDPError
      |- CompositionError (ValueError)      an API applied where it may not be
      |- PlanError        (ValueError)      what cannot be sharded as asked
      |- PhaseError       (RuntimeError)    a call at the wrong moment of the step
      |- CheckpointError  (RuntimeError)    a state that cannot be saved or loaded
      |- DesyncError      (RuntimeError)    ranks that disagree
      '- NotRootError     (AttributeError)  root-only data asked of another state

Every message gives what was expected, what came, where, and the way out; where ranks
exist it ends with the rank that raised.
"""

from __future__ import annotations

import torch.distributed as dist


class FSDPError(Exception):
    """Base of every error that this package raises on purpose.

    ``rank`` is the global rank that raised, ``None`` without torch.distributed.
    """

    rank: int | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.rank is None else f"{text} [rank {self.rank}]"


class CompositionError(FSDPError, ValueError):
    """An API was applied to a module that cannot take it."""


class PlanError(FSDPError, ValueError):
    """A model or an option cannot be sharded as asked; nothing was changed."""


class PhaseError(FSDPError, RuntimeError):
    """A call came at a moment of the step that does not allow it."""


class CheckpointError(FSDPError, RuntimeError):
    """A state dict or a checkpoint does not fit the model; the message lists where."""


class DesyncError(FSDPError, RuntimeError):
    """Ranks disagree on what they are doing."""


class NotRootError(FSDPError, AttributeError):
    """Root-only data was asked of a state that is not a root."""
