"""Refuses a second thread that uses a tree while a first thread is inside.

The units of a tree send collectives in one order, and each unit is in one state. The
checks run only where a tree is found in use: at the begin of a forward or backward, at
a departure from the recorded order, and in calls between steps.
"""

from __future__ import annotations

import sys
import threading
from threading import get_ident

from composable_fsdp.errors import PhaseError
from composable_fsdp.tree.state import RuntimeContext, is_below, root_of

BACKWARDS: dict[int, int] = {}
"""By thread: number of calls of autograd's engine that are running there."""

_ONE_THREAD = (
    "All units of a model send collectives in one order, so one thread at a time may "
    "be inside the model. Let the threads take turns, or give each thread a model of "
    "its own over process groups of its own."
)
"""The end of each error of this module."""


def require_not_elsewhere(context: RuntimeContext) -> None:
    """Refuse if a forward of the tree runs in another thread.

    Raises: PhaseError.
    """
    thread = _thread_in_forward(context)
    if thread is not None:
        _refuse(context, "forward", thread)


def runs_elsewhere(context: RuntimeContext) -> bool:
    """Return whether a forward of the tree runs in another thread."""
    return _thread_in_forward(context) is not None


def require_no_other_backward(context: RuntimeContext) -> None:
    """Refuse if a backward of the tree runs in another thread.

    Raises: PhaseError.
    """
    # A backward that raised may not be marked as dead yet, because a thread of the
    # engine does so; then no call of the engine runs in another thread.
    live = context.tasks.keys() - context.dead
    # Threads that run a backward of any model: the engine does not tell whose.
    others = [thread for thread in BACKWARDS if thread != get_ident()]
    # A backward inside a backward has a task of its own, in the same thread.
    if live and others and BACKWARDS.get(get_ident(), 0) < 2:
        _refuse(context, "backward", others[0])


def _thread_in_forward(context: RuntimeContext) -> int | None:
    """Return the other thread in which a forward of the tree runs, if there is one."""
    frame = context.frame
    # Usually the frame is a few frames up in this thread.
    if frame is None or is_below(frame, sys._getframe(1)):
        return None
    # Only here, where the tree is in use already: this call visits every thread.
    for thread, top in sys._current_frames().items():
        if thread != get_ident() and is_below(frame, top):
            return thread
    return None


def _refuse(context: RuntimeContext, what: str, thread: int) -> None:
    """Raise PhaseError with the names of both threads."""
    # Names and not numbers: users name threads, and logs show these names. A thread
    # that Python did not start has no name.
    names = {each.ident: each.name for each in threading.enumerate()}
    raise PhaseError(
        f"Thread {names.get(get_ident(), get_ident())!r} uses model "
        f"{root_of(context).title}, whose {what} runs in thread "
        f"{names.get(thread, thread)!r}. {_ONE_THREAD}"
    )
