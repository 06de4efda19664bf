"""How far the device is in the collectives that the host has left behind.

The watch thread asks the event behind each all-gather and reduction, not the ``Work``,
which in NCCL holds the outputs. Not run on a GPU; tested with stand-ins.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import time_ns

import torch

from composable_fsdp.comm.groups import MOST_OPERATIONS, GroupRef, operation_logs
from composable_fsdp.comm.operations import Operation

QUIET = 1.0
"""Seconds without a new collective after which the device is asked."""

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal

_asking = threading.Lock()
"""Held while the device is asked, and while a capture is noted."""
_capturing = False


def note_capture(*, capturing: bool) -> None:
    """Note whether a root issues its collectives into a CUDA graph from now on."""
    global _capturing
    if capturing == _capturing:
        return
    # The lock: no event is being asked for when the capture records that event again.
    with _asking:
        _capturing = capturing
        # CUDA ends a capture in which an event of the capture is asked for. Events that
        # a capture has recorded must never be asked for, and a capture records the same
        # events as steps before and after, so the logs forget their events.
        for log in operation_logs():
            log.marks.clear()


def running_in(log: GroupRef) -> Operation | None:
    """Return the operation that the device runs; None if unknown, or none runs."""
    oldest = log.number - MOST_OPERATIONS
    # ``list`` of a dict is atomic: the main thread may write meanwhile. Events of units
    # that are gone must not stay for ever.
    for event, number in list(log.marks.items()):
        if number <= oldest:
            log.marks.pop(event, None)
    if not log.marks or quiet_for(log) < QUIET:
        return None
    running = 0
    with _asking, _beside_captures() as allowed:
        # The collectives of a communicator run in the order of issue, so that an event
        # which was reached answers for all earlier operations.
        newest = sorted(log.marks.items(), key=lambda pair: pair[1], reverse=True)
        for event, number in newest if allowed and not _capturing else ():
            if event.query():
                break
            running = number
    return next((each for each in list(log.operations) if each.number == running), None)


def quiet_for(log: GroupRef) -> float:
    """Return the seconds since the last operation; 0 before the first."""
    return (time_ns() - log.operations[-1].issued) / 1e9 if log.operations else 0.0


@contextmanager
def _beside_captures() -> Iterator[bool]:
    """Let this thread ask for events while another captures; yield whether it may."""
    # In the default mode, a question of any thread ends the capture of any other, such
    # as a capture of a model that this package knows nothing of.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        yield True  # the events are stand-ins
        return
    try:
        exchange = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    # Windows has no namespace of all libraries, and ROCm another name.
    except (AttributeError, OSError, TypeError):
        yield False
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    allowed = exchange(ctypes.byref(mode)) == 0
    try:
        yield allowed
    finally:
        if allowed:
            exchange(ctypes.byref(mode))
