"""Refuses a second thread that uses a tree while a first thread is inside."""

from __future__ import annotations

import sys
import threading
from threading import get_ident

from composable_fsdp.errors import PhaseError
from composable_fsdp.tree.state import RuntimeContext, is_below, root_of

BACKWARDS: dict[int, int] = {}
"""By thread: number of calls of autograd's engine that are running there."""


def require_not_elsewhere(context: RuntimeContext) -> None:
    """Raise PhaseError if a forward of the tree runs in another thread."""
    if runs_elsewhere(context):
        raise _second_thread(context, "forward")


def runs_elsewhere(context: RuntimeContext) -> bool:
    """Return whether a forward of the tree runs in another thread."""
    frame = context.frame
    # Usually the frame is a few frames up in this thread. Only a tree that is in use
    # already visits every thread.
    return (
        frame is not None
        and not is_below(frame, sys._getframe(1))
        and any(is_below(frame, top) for top in sys._current_frames().values())
    )


def require_no_other_backward(context: RuntimeContext) -> None:
    """Raise PhaseError if a backward of the tree runs in another thread."""
    # A backward that raised may not be marked as dead yet, because a thread of the
    # engine does so; then no call of the engine runs in another thread.
    live = context.tasks.keys() - context.dead
    # A backward inside a backward has a task of its own, in the same thread. The engine
    # does not tell whose backward another thread runs.
    if live and BACKWARDS.keys() - {get_ident()} and BACKWARDS.get(get_ident(), 0) < 2:
        raise _second_thread(context, "backward")


def _second_thread(context: RuntimeContext, what: str) -> PhaseError:
    """Return the error of a thread that uses a tree in use."""
    return PhaseError(
        f"Thread {threading.current_thread().name!r} uses model "
        f"{root_of(context).title}, whose {what} runs in another thread. All units of "
        "a model send collectives in one order, so one thread at a time may be inside "
        "the model. Let the threads take turns, or give each thread a model of its own "
        "over process groups of its own."
    )
